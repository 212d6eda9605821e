//! Front ends as processes that are killed under load: the node frees the slots and serves the other one.

use crate::setup::pairs::{provider_named, providers};
use crate::setup::{Front, Node, PATIENCE, by, config, is_full, listen, pair_with, until};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use weft_fabric::ProviderKind;
use weft_fabric::pair::connect;

const ADDRESS: &str = "WEFT_TEST_DISPATCH_FRONT_END";
const PROVIDER: &str = "WEFT_TEST_DISPATCH_PROVIDER";

/// Front end process, which submits until it is killed. As a test it returns at once unless the parent sets an
/// address.
#[test]
fn front_end_process() {
    let (Ok(address), Ok(provider)) = (std::env::var(ADDRESS), std::env::var(PROVIDER)) else {
        return;
    };
    let provider = provider_named(&provider);
    let mut front = Front::new(32);
    front.join(connect(&config(&address, provider, None), by(PATIENCE)).unwrap());
    until("the end of this process", || {
        let result = front.submit(PATIENCE);
        assert!(result.is_ok() || is_full(&result), "{result:?}");
        front.poll().unwrap();
        front.take(|report| panic!("{report:?}"));
        false
    });
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn vanish(provider: ProviderKind) {
    let losses = std::env::var("WEFT_TEST_DISPATCH_LOSSES").ok();
    let losses: u64 = losses.and_then(|losses| losses.parse().ok()).unwrap_or(2);
    let listener = listen(provider);
    let mut node = Node::new(4, Duration::from_micros(50));
    let (pair, steady) = pair_with(&listener, provider, |pair| {
        let mut front = Front::new(16);
        front.join(pair);
        front
    });
    node.join(pair);
    let mut steady = steady.join().unwrap();
    let mut serve = |node: &mut Node| {
        let result = steady.submit(PATIENCE);
        assert!(result.is_ok() || is_full(&result), "{result:?}");
        node.poll().unwrap();
        steady.poll().unwrap();
        steady.take(|report| panic!("{report:?}"));
        steady.answered
    };
    for _ in 0..losses {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "vanishing::front_end_process"])
            .env(ADDRESS, listener.address().to_string())
            .env(PROVIDER, provider.name())
            .stdout(Stdio::null())
            .spawn();
        let mut child = Killed(child.unwrap());
        let index = node.join(listener.accept(by(PATIENCE), &mut || false).unwrap());
        let batches = node.accelerator.batches();
        until("load", || {
            serve(&mut node);
            node.accelerator.batches() > batches + 500
        });
        child.0.kill().unwrap();
        until("the loss", || {
            serve(&mut node);
            !node.accelerator.is_connected(index)
        });
        let answered = serve(&mut node);
        until("answers to the other front end", || serve(&mut node) > answered + 100);
    }
    println!(
        // The harness may have begun the line.
        "\noutcome {{\"test\": \"dispatch_front_end_loss\", \"path\": \"{}\", \"signal\": 9, \"times\": {losses}, \
         \"queries\": {}, \"failed\": 0}}",
        provider.name(),
        steady.answered,
    );
}

#[test]
fn a_front_end_that_is_killed_under_load_costs_the_other_one_no_query_over_shm() {
    vanish(ProviderKind::Shm);
}

#[test]
fn a_front_end_that_is_killed_under_load_costs_the_other_one_no_query_over_tcp() {
    vanish(ProviderKind::Tcp);
}

#[test]
fn a_front_end_that_is_killed_under_load_costs_the_other_one_no_query_over_ofi() {
    if providers().contains(&ProviderKind::Ofi) {
        vanish(ProviderKind::Ofi);
    }
}
