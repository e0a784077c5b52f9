package spark_jobs;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import io.delta.storage.HDFSLogStore;
import java.io.File;
import java.io.IOException;
import java.io.OutputStream;
import java.net.URI;
import java.net.URISyntaxException;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.CopyOption;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.OpenOption;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;
import java.util.Iterator;
import java.util.LinkedHashSet;
import java.util.Set;
import java.util.UUID;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;
import org.apache.spark.sql.delta.util.Codec$Base85Codec$;

/**
 * Puts a commit of a table on a local disk only if it is absent, and only after the disk has all that it names.
 *
 * Delta's own log store looks whether the commit is there, then renames; only threads of one JVM do so in turn. A
 * hard link is made or refused in one step. Nor does Delta force anything to the disk: after a power cut a commit that
 * was acknowledged would be an empty file, or name empty ones. So the files that a commit names, the commit and their
 * folders are forced before the link is made, and the folder of the log after it. The setting FSYNC leaves that out.
 *
 * The source is as simple as Janino, which Spark ships, compiles it.
 */
public class HardLinkLogStore extends HDFSLogStore {
    /** Whether files are forced to the disk: a setting of Spark or of the session, true by default. */
    public static final String FSYNC = "spark.stream_assets.fsync";

    private static final ObjectMapper JSON = new ObjectMapper();
    private static final String FIRST_COMMIT = "00000000000000000000.json";
    private static final String LAST_CHECKPOINT = "_last_checkpoint";

    public HardLinkLogStore(Configuration configuration) {
        super(configuration);
    }

    @Override
    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration configuration)
            throws IOException {
        boolean isForced = configuration.getBoolean(FSYNC, true);
        File target = new File(path.toUri().getPath());
        File log = target.getParentFile();
        File draft = new File(log, "." + target.getName() + "." + UUID.randomUUID() + ".tmp");
        Set files = new LinkedHashSet();
        try {
            OutputStream stream = Files.newOutputStream(draft.toPath());
            try {
                while (actions.hasNext()) {
                    String line = (String) actions.next();
                    stream.write((line + "\n").getBytes(StandardCharsets.UTF_8));
                    if (isForced) {
                        addNamed(target, JSON.readTree(line), files);
                    }
                }
            } finally {
                stream.close();
            }
            if (isForced) {
                files.add(draft);
                forceAll(files, target.getName().equals(FIRST_COMMIT) ? null : log.getParentFile());
            }
            if (overwrite.booleanValue()) {
                Files.move(draft.toPath(), target.toPath(), new CopyOption[] {StandardCopyOption.ATOMIC_MOVE});
            } else {
                link(target, draft);
            }
        } finally {
            Files.deleteIfExists(draft.toPath());
        }
        if (isForced) {
            force(log);
        }
    }

    private static void link(File commit, File draft) throws IOException {
        try {
            Files.createLink(commit.toPath(), draft.toPath());
        } catch (FileAlreadyExistsException isThere) {
            // Delta takes this for a conflict with another commit.
            throw isThere;
        } catch (UnsupportedOperationException error) {
            throw new IOException(NO_LINKS + commit, error);
        } catch (IOException error) {
            throw new IOException(NO_LINKS + commit + ": " + error.getMessage(), error);
        }
    }

    /** Adds the files that a line of a commit, or the pointer to the last checkpoint, names. */
    private static void addNamed(File target, JsonNode line, Set files) throws IOException {
        File log = target.getParentFile();
        if (target.getName().equals(LAST_CHECKPOINT)) {
            addCheckpoint(log, line, files);
            return;
        }
        File root = log.getParentFile();
        JsonNode action = member(line, line.has("add") ? "add" : "cdc");
        if (!action.has("path")) {
            return;
        }
        addFile(resolve(root, member(action, "path").asText()), files);
        JsonNode vector = member(action, "deletionVector");
        String kind = member(vector, "storageType").asText();
        String place = member(vector, "pathOrInlineDv").asText();
        if (kind.equals("p")) {
            addFile(resolve(root, place), files);
        } else if (kind.equals("u")) {
            // A folder, which is empty as a rule, and the number of the file, both in one text.
            int start = place.length() - Codec$Base85Codec$.MODULE$.ENCODED_UUID_LENGTH();
            UUID number = Codec$Base85Codec$.MODULE$.decodeUUID(place.substring(start));
            addFile(new File(new File(root, place.substring(0, start)), "deletion_vector_" + number + ".bin"), files);
        }
    }

    private static void addCheckpoint(File log, JsonNode pointer, Set files) {
        String start = String.format("%020d.checkpoint", new Object[] {Long.valueOf(member(pointer, "version").asLong())});
        File[] found = log.listFiles();
        for (int i = 0; found != null && i < found.length; i++) {
            if (found[i].getName().startsWith(start)) {
                addFile(found[i], files);
            }
        }
        Iterator sidecars = member(member(pointer, "v2Checkpoint"), "sidecarFiles").iterator();
        while (sidecars.hasNext()) {
            String name = member((JsonNode) sidecars.next(), "path").asText();
            addFile(new File(new File(log, "_sidecars"), name), files);
        }
    }

    /** Janino takes path() for that of an interface, which gives less. */
    private static JsonNode member(JsonNode node, String name) {
        return (JsonNode) node.path(name);
    }

    /** A file, and the checksums that Hadoop keeps beside it: with torn ones Spark does not read it. */
    private static void addFile(File file, Set files) {
        files.add(file);
        files.add(new File(file.getParentFile(), "." + file.getName() + ".crc"));
    }

    /** As Delta has it: a URI, absolute or from the folder of the table. */
    private static File resolve(File root, String name) throws IOException {
        try {
            File file = new File(new URI(name).getPath());
            return file.isAbsolute() ? file : new File(root, file.getPath());
        } catch (URISyntaxException error) {
            throw new IOException("a commit names the file " + name, error);
        }
    }

    /** Forces files, then their folders up to the one of the table; to the topmost one if the table is new. */
    private static void forceAll(Set files, File top) throws IOException {
        Set folders = new LinkedHashSet();
        Iterator each = files.iterator();
        while (each.hasNext()) {
            File file = (File) each.next();
            force(file);
            File folder = file.getParentFile();
            // Who made a folder can read it.
            while (folder != null && folder.canRead() && folders.add(folder) && !folder.equals(top)) {
                folder = folder.getParentFile();
            }
        }
        each = folders.iterator();
        while (each.hasNext()) {
            force((File) each.next());
        }
    }

    private static void force(File file) throws IOException {
        FileChannel channel;
        try {
            channel = FileChannel.open(file.toPath(), new OpenOption[] {StandardOpenOption.READ});
        } catch (NoSuchFileException isNotHere) {
            // There are no checksums of it, or an executor wrote it to the disk of another machine.
            return;
        }
        try {
            channel.force(true);
        } catch (IOException error) {
            throw new IOException(NOT_FORCED + file + ": " + error.getMessage(), error);
        } finally {
            channel.close();
        }
    }

    private static final String NO_LINKS = "no hard link could be made for ";
    private static final String NOT_FORCED = "the disk did not take ";
}
