package spark_jobs;

import io.delta.storage.HadoopFileSystemLogStore;
import java.io.ByteArrayOutputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.Arrays;
import java.util.Iterator;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;

/**
 * Puts a commit of a table on Amazon S3, or a store that speaks its protocol, only if it is absent.
 *
 * The store decides: the request says "If-None-Match: *", and of two that come at the same time one is refused. S3A
 * sends it since Hadoop 3.4.2; an older one does not know the option, and refuses it. The source is as simple as
 * Janino, which Spark ships, compiles it.
 */
public class ConditionalWriteLogStore extends HadoopFileSystemLogStore {
    private static final String IF_ABSENT = "fs.option.create.conditional.overwrite";
    private static final int ATTEMPTS = 5;
    private static final long PAUSE_MILLIS = 200L;

    public ConditionalWriteLogStore(Configuration configuration) {
        super(configuration);
    }

    @Override
    public void write(Path path, Iterator<String> actions, Boolean overwrite, Configuration configuration)
            throws IOException {
        byte[] content = lines(actions);
        FileSystem files = path.getFileSystem(configuration);
        if (overwrite.booleanValue()) {
            put(files.create(path, true), content);
            return;
        }
        for (int attempt = 1; true; attempt++) {
            IOException refused;
            try {
                FSDataOutputStreamBuilder builder = files.createFile(path);
                builder.overwrite(true);
                builder.must(IF_ABSENT, true);
                put((FSDataOutputStream) builder.build(), content);
                return;
            } catch (IOException error) {
                refused = error;
            } catch (IllegalArgumentException error) {
                throw new IOException(TOO_OLD + path, error);
            }
            // The answer alone does not tell: the client tries again when one was lost, and is refused because of
            // itself; and a store may refuse both of two that come at the same time.
            byte[] found = read(files, path);
            if (found != null && Arrays.equals(found, content)) {
                return;
            }
            if (found != null) {
                FileAlreadyExistsException isThere = new FileAlreadyExistsException(path.toString());
                isThere.initCause(refused);
                // Delta takes this for a conflict with another commit.
                throw isThere;
            }
            if (attempt == ATTEMPTS) {
                throw refused;
            }
            pause(attempt);
        }
    }

    @Override
    public Boolean isPartialWriteVisible(Path path, Configuration configuration) {
        return Boolean.FALSE;
    }

    private static byte[] lines(Iterator<String> actions) throws IOException {
        ByteArrayOutputStream content = new ByteArrayOutputStream();
        while (actions.hasNext()) {
            content.write((actions.next() + "\n").getBytes(StandardCharsets.UTF_8));
        }
        return content.toByteArray();
    }

    /** The object is made by the end of the stream. */
    private static void put(FSDataOutputStream stream, byte[] content) throws IOException {
        try {
            stream.write(content);
        } catch (IOException error) {
            // What was written of it must not become a commit.
            stream.abort();
            throw error;
        }
        stream.close();
    }

    private static byte[] read(FileSystem files, Path path) throws IOException {
        FSDataInputStream stream;
        try {
            stream = files.open(path);
        } catch (FileNotFoundException isNotThere) {
            return null;
        }
        try {
            ByteArrayOutputStream content = new ByteArrayOutputStream();
            byte[] part = new byte[65536];
            int count = stream.read(part);
            while (count >= 0) {
                content.write(part, 0, count);
                count = stream.read(part);
            }
            return content.toByteArray();
        } catch (FileNotFoundException isNotThere) {
            // S3A opens only when it reads.
            return null;
        } finally {
            stream.close();
        }
    }

    private static void pause(int attempt) throws IOException {
        try {
            Thread.sleep(attempt * PAUSE_MILLIS);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
            throw new IOException("interrupted before the commit was put", error);
        }
    }

    private static final String TOO_OLD =
            "this Hadoop cannot put an object only if it is absent; 3.4.2 and newer can, with Spark 4.1 or newer: ";
}
