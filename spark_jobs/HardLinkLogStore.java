package spark_jobs;

import io.delta.storage.HDFSLogStore;
import java.io.File;
import java.io.IOException;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.Files;
import java.util.Iterator;
import java.util.UUID;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.Path;

/**
 * Puts a commit of a table on a local disk only if it is absent, also when another process does so at the same time.
 *
 * Delta's own log store looks whether the commit is there, then renames; only threads of one JVM do so in turn. A
 * hard link is made or refused in one step. The source is as simple as Janino, which Spark ships, compiles it.
 */
public class HardLinkLogStore extends HDFSLogStore {
    public HardLinkLogStore(Configuration configuration) {
        super(configuration);
    }

    @Override
    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration configuration)
            throws IOException {
        if (overwrite.booleanValue()) {
            super.write(path, actions, overwrite, configuration);
            return;
        }
        File commit = new File(path.toUri().getPath());
        File draft = new File(commit.getParentFile(), "." + commit.getName() + "." + UUID.randomUUID() + ".tmp");
        try {
            OutputStream stream = Files.newOutputStream(draft.toPath());
            try {
                while (actions.hasNext()) {
                    stream.write((actions.next() + "\n").getBytes(StandardCharsets.UTF_8));
                }
            } finally {
                stream.close();
            }
            link(commit, draft);
        } finally {
            Files.deleteIfExists(draft.toPath());
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

    private static final String NO_LINKS = "no hard link could be made for ";
}
