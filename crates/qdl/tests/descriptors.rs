//! A node without a free descriptor: it goes on once there is one.

use std::fs::File;
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use weft_dispatch::{AcceleratorConfig, Schema};
use weft_qdl::network::{End, ask_names, connect};
use weft_qdl::{Counts, Model, ModelBackend, Node, NodeConfig};

const PATIENCE: Duration = Duration::from_secs(20);
/// Set in the process with few descriptors.
const INNER: &str = "WEFT_TEST_DESCRIPTORS";

#[test]
fn a_node_accepts_again_after_a_shortage_of_descriptors() {
    if std::env::var_os(INNER).is_none() {
        let own = std::env::current_exe().unwrap();
        let status = Command::new("sh")
            .args(["-c", "ulimit -n 200 && exec \"$0\" --nocapture"])
            .arg(own)
            .env(INNER, "1")
            // The panics go to standard error.
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let end = End { slots: 16, patience: PATIENCE, ..End::default() };
    let config = NodeConfig {
        address: "127.0.0.1:0".into(),
        name: "alpha".into(),
        schema: Schema::bytes(100, 8),
        batches: AcceleratorConfig::default(),
        handshakes: NodeConfig::HANDSHAKES,
        end: end.clone(),
    };
    let counts = Arc::new(Counts::default());
    let backend = ModelBackend::new(Model::default(), 8, counts.clone()).unwrap();
    let node = Node::bind(config, backend, counts).unwrap();
    let (address, stop) = (node.address().to_string(), node.stop_flag());
    std::thread::scope(|scope| {
        let served = scope.spawn(|| node.serve());
        std::thread::sleep(Duration::from_millis(500));
        let mut files: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        // One descriptor, for this end's connection.
        files.pop();
        let dialler = TcpStream::connect(&address).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        assert!(!served.is_finished(), "the node has ended");
        drop((files, dialler));
        let links = connect(&[address], &end).unwrap();
        assert_eq!(ask_names(&links, PATIENCE).unwrap()[0].name, "alpha");
        stop.store(true, Ordering::Relaxed);
        drop(links);
        served.join().unwrap().unwrap();
    });
}
