import java.net.InetSocketAddress;
import org.apache.hadoop.hive.conf.HiveConf;
import org.apache.hadoop.hive.metastore.HiveMetaStore;
import org.apache.hadoop.hive.metastore.TSetIpAddressProcessor;
import org.apache.hadoop.hive.metastore.api.ThriftHiveMetastore;
import org.apache.thrift.server.TThreadPoolServer;
import org.apache.thrift.transport.TServerSocket;

/** Hive's metastore on the loopback interface; its own main listens on all of them, and cannot choose a port. */
public class Metastore {
    public static void main(String[] args) throws Exception {
        HiveConf conf = new HiveConf();
        ThriftHiveMetastore.Iface handler = HiveMetaStore.newRetryingHMSHandler("metastore", conf, false);
        TServerSocket socket = new TServerSocket(new InetSocketAddress("127.0.0.1", Integer.parseInt(args[0])));
        TThreadPoolServer.Args serving = new TThreadPoolServer.Args(socket);
        serving.processor(new TSetIpAddressProcessor(handler));
        System.out.println("metastore at thrift://127.0.0.1:" + socket.getServerSocket().getLocalPort());
        new TThreadPoolServer(serving).serve();
    }
}
