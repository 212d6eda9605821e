//! Limits on memory, lanes and backends.

use super::{PATIENCE, Recorder, SLOTS, Sum, by, hello, pair_config, schema};
use std::sync::Arc;
use weft_dispatch::accelerator::Threaded;
use weft_dispatch::wire::{DataType, Dimension, Tensor};
use weft_dispatch::{
    Connection, FrontEndService, Hello, LedgerConfig, Role, Schema, ServiceConfig,
};
use weft_fabric::pair::{Listener, connect};
use weft_fabric::{Memory, ProviderKind};

#[test]
fn a_front_end_refuses_slots_beyond_its_limit_and_engines_with_too_few_lanes() {
    let join = |schema: Schema, config: ServiceConfig, lanes: Option<usize>| {
        let mut pairs = pair_config("127.0.0.1:0", ProviderKind::Shm, PATIENCE, SLOTS);
        if let Some(lanes) = lanes {
            pairs.engine.lanes = lanes;
        }
        let listener = Listener::bind(pairs).unwrap();
        let address = listener.address().to_string();
        let dialled = pair_config(&address, ProviderKind::Shm, PATIENCE, SLOTS);
        let memory = Arc::new(Memory::shared(4096).unwrap());
        let handler = Recorder { ends: Arc::default(), memory: memory.clone() };
        let ledger = LedgerConfig { slots: SLOTS, ..LedgerConfig::default() };
        let front_end =
            FrontEndService::start(config, ledger, schema.clone(), &[memory], handler).unwrap();
        let hello = |role| Hello { schema: Some(schema.clone()), ..hello(role) };
        std::thread::scope(|scope| {
            let node = scope.spawn(|| {
                let pair = connect(&dialled, by()).unwrap();
                // It fails with the front end.
                drop(Connection::over(&pair, &hello(Role::Accelerator), by()));
            });
            let pair = listener.accept(by(), &mut || false).unwrap();
            let joined = front_end.join(pair, &hello(Role::FrontEnd), by());
            node.join().unwrap();
            joined.map(drop).map_err(|error| error.to_string())
        })
    };
    let default = ServiceConfig::default();
    let error = join(Schema::bytes(8, 1 << 27), default, None).unwrap_err();
    let expected = format!("expected at most {}", 1 << 30);
    assert!(error.starts_with("node Accelerator: 16 slots take 2147"), "{error}");
    assert!(error.contains(&expected) && error.contains("max_slot_bytes"), "{error}");
    let within = |max_slot_bytes| ServiceConfig { max_slot_bytes, ..default };
    assert!(join(schema(), within(16 * 64), None).is_err());
    assert_eq!(join(schema(), within(16 * 256), None), Ok(()));
    let tokens = Tensor::new("tokens", DataType::I32, &[Dimension::Tokens(8)]);
    let tokens = Schema { outputs: vec![tokens], ..schema() };
    let error = join(tokens, default, Some(64)).unwrap_err();
    assert!(error.contains("answers in tokens"), "{error}");
    assert!(error.contains("Connection::streaming_engine_config(16)"), "{error}");
}

#[test]
fn an_executor_without_a_backend_is_refused() {
    let error = Threaded::new(Vec::<Sum>::new(), Box::new(|| ())).unwrap_err();
    assert_eq!(error.to_string(), "backends 0: expected at least 1");
}
