//! Wire format: what is encoded is decoded, and any other bytes are refused by an error that names the field.

use proptest::prelude::*;
use weft_dispatch::wire::{DataType, Dimension, Header, Layout, Tensor, VERSION, checksum};
use weft_dispatch::{Agreement, Error, Hello, Role, Schema};

fn dtype() -> impl Strategy<Value = DataType> {
    use DataType::{Bf16, F16, F32, F64, I8, I32, I64, U8};
    prop::sample::select(vec![U8, I8, I32, I64, F16, Bf16, F32, F64])
}

fn tensor() -> impl Strategy<Value = Tensor> {
    let fixed = prop::collection::vec(0u64..9, 0..5);
    let variable = prop::option::of((0usize..6, 0u64..300));
    ("[a-z_é]{0,12}", dtype(), fixed, variable).prop_map(|(name, dtype, fixed, variable)| {
        let mut shape: Vec<Dimension> = fixed.into_iter().map(Dimension::Fixed).collect();
        if let Some((at, bound)) = variable {
            shape.insert(at.min(shape.len()), Dimension::UpTo(bound));
        }
        Tensor { name, dtype, shape }
    })
}

fn schema() -> impl Strategy<Value = Schema> {
    let tensors = || prop::collection::vec(tensor(), 1..5);
    let tokens = (1u64..9, 1u64..4, 0usize..5);
    (tensors(), tensors(), prop::option::of(tokens)).prop_map(|(inputs, mut outputs, tokens)| {
        if let Some((bound, size, at)) = tokens {
            let shape = [Dimension::Tokens(bound), Dimension::Fixed(size)];
            outputs.insert(at.min(outputs.len()), Tensor::new("tokens", DataType::I32, &shape));
        }
        Schema { inputs, outputs }
    })
}

fn hello() -> impl Strategy<Value = Hello> {
    let role = prop::sample::select(vec![Role::FrontEnd, Role::Accelerator]);
    (role, 1..=Hello::MAX_SLOTS, any::<bool>(), "[ -~é]{0,40}", prop::option::of(schema()))
        .prop_map(|(role, slots, checksum, name, schema)| Hello {
            role,
            slots,
            checksum,
            name,
            schema,
        })
}

/// Tensor lengths that each type admits.
fn lengths(tensors: &[Tensor], draws: &[u64]) -> Vec<u64> {
    let length = |(tensor, draw): (&Tensor, &u64)| {
        let variable = tensor.shape.iter().find_map(|size| match size {
            Dimension::UpTo(bound) | Dimension::Tokens(bound) => Some(*bound),
            Dimension::Fixed(_) => None,
        });
        match variable {
            Some(bound) if bound > 0 => tensor.max_bytes() / bound * (draw % (bound + 1)),
            _ => tensor.max_bytes(),
        }
    };
    tensors.iter().zip(draws).map(length).collect()
}

proptest! {
    #[test]
    fn a_hello_is_decoded_as_it_was_encoded(hello in hello()) {
        prop_assert_eq!(Hello::decode(&hello.encode()).unwrap(), hello);
    }

    #[test]
    fn a_hello_that_was_cut_or_lengthened_is_refused(hello in hello(), cut in any::<prop::sample::Index>()) {
        let mut bytes = hello.encode();
        let length = cut.index(bytes.len());
        let error = Hello::decode(&bytes[..length]).unwrap_err();
        prop_assert!(matches!(&error, Error::Malformed { what: "hello", .. }), "{error}");
        bytes.push(0);
        let error = Hello::decode(&bytes).unwrap_err().to_string();
        prop_assert!(error.contains("behind the last field"), "{error}");
    }

    /// Any byte change gives another hello or an error, never a panic.
    #[test]
    fn a_hello_with_changed_bytes_is_another_one_or_refused(
        hello in hello(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 1..6),
    ) {
        let mut bytes = hello.encode();
        for (at, change) in changes {
            let at = at.index(bytes.len());
            bytes[at] ^= change;
        }
        if let Ok(other) = Hello::decode(&bytes) {
            prop_assert_eq!(Hello::decode(&other.encode()).unwrap(), other);
        }
    }

    #[test]
    fn random_bytes_are_no_hello(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Hello::decode(&bytes).is_err());
        let after_the_version = [&Hello::encode(&plain(Role::FrontEnd))[..10], &bytes].concat();
        if let Ok(hello) = Hello::decode(&after_the_version) {
            prop_assert!(hello.schema.is_none_or(|schema| schema.check().is_ok()));
        }
    }

    #[test]
    fn a_header_is_decoded_as_it_was_encoded(
        schema in schema(),
        (turn, word, sum) in (any::<u32>(), any::<u32>(), any::<u64>()),
        draws in prop::collection::vec(any::<u64>(), 5),
    ) {
        let layout = Layout::new(&schema.inputs);
        let mut header = Header::new(turn, word, lengths(&schema.inputs, &draws));
        header.checksum = sum;
        let mut bytes = vec![0xa5; layout.header_bytes() as usize];
        header.encode(&mut bytes);
        prop_assert_eq!(Header::decode(&bytes, &layout, turn, false).unwrap(), header);
        prop_assert!(Header::decode(&bytes, &layout, turn.wrapping_add(1), false).is_err());
        prop_assert!(Header::decode(&bytes[..header.lengths().len() * 8 + 31], &layout, turn, false).is_err());
    }

    /// An answer part is decoded as it was encoded; for queries and without tokens it is refused.
    #[test]
    fn a_part_belongs_to_an_answer_with_tokens(schema in schema(), turn in any::<u32>(), tokens in 0u64..12) {
        let layout = Layout::new(&schema.outputs);
        let mut bytes = vec![0xa5; layout.header_bytes() as usize];
        let header = Header::part(turn, tokens * layout.token_bytes().max(1));
        header.encode(&mut bytes);
        let decoded = Header::decode(&bytes, &layout, turn, true);
        let bound = layout.stream().map(|stream| schema.outputs[stream].max_bytes());
        match bound.filter(|bound| tokens * layout.token_bytes() <= *bound) {
            Some(_) => prop_assert_eq!(decoded.unwrap(), header),
            None => prop_assert!(decoded.is_err()),
        }
        prop_assert!(Header::decode(&bytes, &layout, turn, false).is_err());
    }

    /// A header with random bytes is refused, or its lengths are inside the slot.
    #[test]
    fn lengths_of_any_header_are_inside_of_the_slot(
        schema in schema(),
        turn in 0u32..3,
        random in prop::collection::vec(any::<u8>(), 192),
        lengths in prop::collection::vec(prop_oneof![0u64..400, any::<u64>()], 16),
        plain in any::<bool>(),
    ) {
        let layout = Layout::new(&schema.inputs);
        let mut bytes = random;
        if plain {
            Header::new(turn, 0, lengths[..schema.inputs.len()].iter().copied()).encode(&mut bytes);
        }
        if let Ok(header) = Header::decode(&bytes, &layout, turn, true) {
            for (index, length) in header.lengths().iter().enumerate() {
                let end = layout.offset(index) + length;
                prop_assert!(end <= layout.stride());
                prop_assert!(index + 1 == layout.tensors().len() || end <= layout.offset(index + 1));
            }
        }
    }

    #[test]
    fn a_checksum_changes_with_any_byte_and_any_length(
        bytes in prop::collection::vec(any::<u8>(), 1..100),
        at in any::<prop::sample::Index>(),
        change in 1u8..,
    ) {
        let sum = checksum([bytes.as_slice()]);
        let mut other = bytes.clone();
        other[at.index(bytes.len())] ^= change;
        prop_assert_ne!(checksum([other.as_slice()]), sum);
        let split = at.index(bytes.len());
        prop_assert_ne!(checksum([&bytes[..split], &bytes[split..]]), sum);
        prop_assert_ne!(checksum([[bytes.as_slice(), &[0]].concat().as_slice()]), sum);
    }
}

fn plain(role: Role) -> Hello {
    let schema = (role == Role::Accelerator).then(|| Schema::bytes(1000, 8));
    Hello { role, slots: 64, checksum: false, name: "node 1".into(), schema }
}

#[test]
fn both_ends_compute_one_agreement() {
    let front = Hello { slots: 32, checksum: true, ..plain(Role::FrontEnd) };
    let accelerator = plain(Role::Accelerator);
    let agreement = Agreement::of(&front, &accelerator).unwrap();
    assert_eq!(Agreement::of(&accelerator, &front).unwrap(), agreement);
    assert_eq!(
        (agreement.slots, agreement.checksum, agreement.name.as_str()),
        (32, true, "node 1")
    );
    let strides = (agreement.queries().stride(), agreement.answers().stride());
    assert_eq!(strides, (64 + 1024, 64 + 64));
}

#[test]
fn ends_that_do_not_fit_together_are_refused_with_both_values() {
    let refusal = |one: &Hello, other: &Hello| Agreement::of(one, other).unwrap_err().to_string();
    let (front, accelerator) = (plain(Role::FrontEnd), plain(Role::Accelerator));
    assert!(refusal(&front, &front).contains("both ends are FrontEnd"));
    let silent = Hello { schema: None, ..accelerator.clone() };
    assert!(refusal(&front, &silent).contains("node node 1 sent no schema"));
    let other = Hello { schema: Some(Schema::bytes(1000, 9)), ..front };
    let text = refusal(&accelerator, &other);
    assert!(text.contains("output U8[<=9]") && text.contains("output U8[<=8]"), "{text}");
}

#[test]
fn another_version_and_another_program_are_named() {
    let mut bytes = plain(Role::Accelerator).encode();
    bytes[8] = VERSION as u8 + 1;
    let error = Hello::decode(&bytes).unwrap_err();
    assert!(matches!(error, Error::Version { ours: VERSION, theirs } if theirs == VERSION + 1));
    bytes[0] ^= 1;
    let text = Hello::decode(&bytes).unwrap_err().to_string();
    assert!(text.contains("magic number"), "{text}");
}

#[test]
fn schemas_beyond_their_limits_are_refused() {
    let refusal = |inputs: Vec<Tensor>| {
        let outputs = vec![Tensor::bytes("output", 1)];
        Schema { inputs, outputs }.check().unwrap_err().to_string()
    };
    let one = || Tensor::bytes("t", 8);
    let up_to = Dimension::UpTo(2);
    assert!(refusal(Vec::new()).contains("0 inputs: expected 1 to 16"));
    assert!(refusal(vec![one(); 17]).contains("17 inputs"));
    let two = Tensor::new("t", DataType::F32, &[up_to, up_to]);
    assert!(
        refusal(vec![two]).contains("t F32[<=2, <=2]: expected at most one variable dimension")
    );
    let deep = Tensor::new("t", DataType::F32, &[Dimension::Fixed(1); 9]);
    assert!(refusal(vec![deep]).contains("at most 8 dimensions"));
    let large = Tensor::new("t", DataType::F64, &[Dimension::Fixed(u64::MAX); 3]);
    assert!(refusal(vec![large]).contains("bytes, expected at most"));
    let tokens = |shape: &[Dimension]| Tensor::new("t", DataType::I32, shape);
    let inner = tokens(&[Dimension::Fixed(2), Dimension::Tokens(2)]);
    assert!(refusal(vec![inner]).contains("expected tokens as the first dimension"));
    let outer = tokens(&[Dimension::Tokens(2)]);
    assert!(refusal(vec![outer.clone()]).contains("1 inputs of tokens: expected at most 0"));
    let both = Schema { inputs: vec![one()], outputs: vec![outer; 2] };
    assert!(both.check().unwrap_err().to_string().contains("2 outputs of tokens"));
    let long = Tensor::bytes(&"n".repeat(256), 1);
    assert!(refusal(vec![long]).contains("256 bytes, at most 255"));
}

#[test]
fn an_answer_with_an_error_has_no_tensors() {
    let layout = Layout::new(&[Tensor::bytes("output", 100)]);
    let mut bytes = vec![0; layout.header_bytes() as usize];
    Header::new(3, 17, []).encode(&mut bytes);
    let header = Header::decode(&bytes, &layout, 3, true).unwrap();
    assert_eq!((header.word, header.lengths()), (17, &[][..]));
    let text = Header::decode(&bytes, &layout, 3, false).unwrap_err().to_string();
    assert!(text.contains("0 tensors: expected 1"), "{text}");
    header.check(0).unwrap();
    assert!(matches!(header.check(1), Err(Error::Checksum { expected: 0, seen: 1 })));
}
