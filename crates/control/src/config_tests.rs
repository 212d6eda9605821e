//! Configuration tests: launchers, precedence, and errors.

use super::*;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

fn resolve_with(variables: &[(&str, &str)], overrides: Overrides) -> Result<Config> {
    let lookup = |name: &str| {
        variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
    };
    Config::resolve(&lookup, overrides)
}

fn resolve_raw(variables: &[(&str, &[u8])]) -> Result<Config> {
    let lookup = |name: &str| {
        let found = variables.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| OsStr::from_bytes(value).to_owned())
    };
    Config::resolve(&lookup, Overrides::default())
}

fn resolve(variables: &[(&str, &str)]) -> Result<Config> {
    resolve_with(variables, Overrides::default())
}

fn refusal(variables: &[(&str, &str)]) -> String {
    resolve(variables).unwrap_err().to_string()
}

fn assignment_of(config: &Config) -> (u32, u32, &str, u16) {
    (config.rank.0, config.world_size, &config.host, config.port)
}

const TORCHRUN: [(&str, &str); 7] = [
    ("RANK", "3"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "2"),
    ("MASTER_ADDR", "node1"),
    ("MASTER_PORT", "29500"),
    ("WEFT_SECRET", "apple"),
];

#[test]
fn without_variables_the_world_has_one_rank() {
    let config = resolve(&[]).unwrap();
    assert_eq!(assignment_of(&config), (0, 1, "127.0.0.1", DEFAULT_PORT));
}

#[test]
fn torchrun_and_the_port_after_its_own() {
    let config = resolve(&TORCHRUN).unwrap();
    assert_eq!(assignment_of(&config), (3, 8, "node1", 29501));
    assert_eq!((config.local_rank, config.local_size), (Some(1), Some(2)));
}

#[test]
fn torchrun_on_one_host_stays_on_loopback() {
    let variables = [
        ("RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "myhost.example"),
        ("MASTER_PORT", "4000"),
    ];
    assert_eq!(assignment_of(&resolve(&variables).unwrap()), (1, 2, "127.0.0.1", 4001));
}

#[test]
fn own_variables_come_before_a_launchers() {
    let mut variables = TORCHRUN.to_vec();
    variables.extend([("WEFT_RANK", "0"), ("WEFT_WORLD_SIZE", "2"), ("WEFT_ADDR", "other")]);
    variables.push(("WEFT_PORT", "7"));
    assert_eq!(assignment_of(&resolve(&variables).unwrap()), (0, 2, "other", 7));
}

#[test]
fn overrides_come_before_everything() {
    let overrides = Overrides {
        rank: Some(5),
        world_size: Some(6),
        address: Some("[::1]:9".into()),
        ..Overrides::default()
    };
    assert_eq!(assignment_of(&resolve_with(&TORCHRUN, overrides).unwrap()), (5, 6, "::1", 9));
}

#[test]
fn open_mpi_and_slurm() {
    let open_mpi = [
        ("OMPI_COMM_WORLD_RANK", "2"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
    ];
    assert_eq!(assignment_of(&resolve(&open_mpi).unwrap()), (2, 4, "127.0.0.1", DEFAULT_PORT));
    let two_hosts = [open_mpi[0], open_mpi[1], ("OMPI_COMM_WORLD_LOCAL_SIZE", "2")];
    assert!(refusal(&two_hosts).contains("set WEFT_ADDR"));

    let slurm = [
        ("SLURM_PROCID", "9"),
        ("SLURM_NTASKS", "16"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_JOB_NODELIST", "node[003-004,9]"),
        ("WEFT_SECRET", "apple"),
    ];
    assert_eq!(assignment_of(&resolve(&slurm).unwrap()), (9, 16, "node003", DEFAULT_PORT));
    let one = [slurm[0], slurm[1], ("SLURM_JOB_NODELIST", "node7")];
    assert_eq!(assignment_of(&resolve(&one).unwrap()), (9, 16, "127.0.0.1", DEFAULT_PORT));
    let bad = [slurm[0], slurm[1], ("SLURM_JOB_NODELIST", "node[")];
    assert!(refusal(&bad).contains("SLURM_JOB_NODELIST"));
}

#[test]
fn contradictions_name_the_variable_and_the_remedy() {
    type Case = (&'static [(&'static str, &'static str)], &'static [&'static str]);
    let cases: [Case; 11] = [
        (&[("RANK", "1")], &["RANK is set without WORLD_SIZE"]),
        (&[("WEFT_WORLD_SIZE", "1")], &["WEFT_WORLD_SIZE is set without WEFT_RANK"]),
        (&[("RANK", "4"), ("WORLD_SIZE", "4")], &["RANK is \"4\"", "WORLD_SIZE is 4", "0 to 3"]),
        (&[("RANK", "x"), ("WORLD_SIZE", "4")], &["RANK is \"x\"", "not a whole number"]),
        (&[("RANK", "0"), ("WORLD_SIZE", "0")], &["WORLD_SIZE is \"0\"", "at least 1"]),
        (&[("MASTER_PORT", "65535")], &["MASTER_PORT", "WEFT_PORT"]),
        (&[("WEFT_PORT", "65536")], &["WEFT_PORT", "a port from 0 to 65535"]),
        (
            &[("RANK", "0"), ("WORLD_SIZE", "65537")],
            &["WORLD_SIZE is \"65537\"", "at most 65536", "1 to 65536"],
        ),
        (
            &[("WEFT_RANK", "7"), ("WEFT_WORLD_SIZE", "4294967295")],
            &["WEFT_WORLD_SIZE", "at most 65536"],
        ),
        (&[("WEFT_SILENCE_TIMEOUT", "0.001")], &["WEFT_SILENCE_TIMEOUT", "1ms", "10ms"]),
        (&[("WEFT_SILENCE_TIMEOUT", "-1")], &["WEFT_SILENCE_TIMEOUT", "seconds"]),
    ];
    for (variables, words) in cases {
        let message = refusal(variables);
        for word in words {
            assert!(message.contains(word), "{message:?} lacks {word:?}");
        }
    }
}

#[test]
fn several_hosts_without_a_secret_are_refused_with_the_remedy() {
    let without: Vec<_> = TORCHRUN.into_iter().filter(|(name, _)| *name != "WEFT_SECRET").collect();
    let message = refusal(&without);
    assert!(message.contains("node1") && message.contains("WEFT_SECRET"), "{message}");
    let all_addresses = [("WEFT_RANK", "0"), ("WEFT_WORLD_SIZE", "2"), ("WEFT_BIND", "0.0.0.0")];
    assert!(refusal(&all_addresses).contains("WEFT_SECRET"));
}

#[test]
fn a_value_that_is_not_utf8_is_an_error_that_names_its_variable() {
    let names = [
        "WEFT_RANK",
        "WEFT_LOCAL_RANK",
        "WEFT_ADDR",
        "WEFT_PORT",
        "WEFT_BIND",
        "WEFT_ADVERTISE",
        "WEFT_HOST_ID",
        "WEFT_CONNECT_TIMEOUT",
        "WEFT_SILENCE_TIMEOUT",
        "RANK",
        "MASTER_PORT",
        "SLURM_NTASKS",
    ];
    for name in names {
        let message = resolve_raw(&[(name, b"1\xff")]).unwrap_err().to_string();
        assert!(message.starts_with(name) && message.contains("UTF-8"), "{message}");
    }
}

#[test]
fn a_secret_is_bytes() {
    let secret = |bytes: &[u8]| resolve_raw(&[("WEFT_SECRET", bytes)]).unwrap().secret.unwrap();
    assert!(secret(b"\xff\x01") == secret(b"\xff\x01"));
    assert!(secret(b"\xff\x01") != secret(b"\xfe\x01"));
}

#[test]
fn the_path_of_a_secret_may_have_any_bytes() {
    let folder = std::env::temp_dir().join(format!("weft-raw-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join(OsStr::from_bytes(b"se\xffcret"));
    std::fs::write(&path, b"\xfe\xff").unwrap();
    let found = resolve_raw(&[("WEFT_SECRET_FILE", path.as_os_str().as_bytes())]);
    assert!(found.unwrap().secret.unwrap() == Secret::new(*b"\xfe\xff").unwrap());
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_secret_file_that_is_missing_is_named() {
    assert!(
        refusal(&[("WEFT_SECRET_FILE", "/nonexistent/secret")]).contains("/nonexistent/secret")
    );
}

#[test]
fn a_secret_file_is_a_regular_one_of_at_most_64_kib() {
    let folder = std::env::temp_dir().join(format!("weft-secret-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = |name: &str| folder.join(name).to_string_lossy().into_owned();
    std::fs::write(file("good"), [b"x".repeat(64 << 10), b"".to_vec()].concat()).unwrap();
    assert!(resolve(&[("WEFT_SECRET_FILE", &file("good"))]).unwrap().secret.is_some());
    std::fs::write(file("large"), b"x".repeat((64 << 10) + 1)).unwrap();
    // A sparse 1 TiB file, which must not be read.
    std::fs::File::create(file("huge")).unwrap().set_len(1 << 40).unwrap();
    for (path, word) in [
        (file("large"), "65537 bytes"),
        (file("huge"), "at most 65536"),
        ("/dev/zero".into(), "not a regular file"),
        (file(""), "not a regular file"),
    ] {
        let message = refusal(&[("WEFT_SECRET_FILE", &path)]);
        assert!(message.contains(word) && message.contains(&path), "{message}");
    }
    rustix::fs::mknodat(
        rustix::fs::CWD,
        file("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    // A FIFO without a writer.
    assert!(refusal(&[("WEFT_SECRET_FILE", &file("fifo"))]).contains("not a regular file"));
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_time_that_is_no_number_or_has_no_end_is_refused() {
    for text in ["inf", "-inf", "nan", "1e300", "0", "-1"] {
        for name in ["WEFT_CONNECT_TIMEOUT", "WEFT_SILENCE_TIMEOUT"] {
            assert!(refusal(&[(name, text)]).contains(name), "{name}={text}");
        }
    }
    let long = resolve(&[("WEFT_CONNECT_TIMEOUT", "1e19"), ("WEFT_SILENCE_TIMEOUT", "1e19")]);
    assert!(long.unwrap().connect_timeout > Duration::from_secs(1 << 60));
}

#[test]
fn blank_counts_as_not_set() {
    assert_eq!(resolve(&[("RANK", " "), ("WORLD_SIZE", "")]).unwrap().world_size, 1);
}

#[test]
fn addresses_in_every_form() {
    for (text, host, port) in [
        ("node1", "node1", 1),
        ("node1:2", "node1", 2),
        ("::1", "::1", 1),
        ("[fe80::1]:3", "fe80::1", 3),
        ("10.0.0.1:4", "10.0.0.1", 4),
    ] {
        assert_eq!(split_address("WEFT_ADDR", text, 1).unwrap(), (host.to_string(), port));
    }
    for bad in ["node1:x", ":4", "node1:70000", "[::1]9", "[::1]x:9"] {
        assert!(split_address("WEFT_ADDR", bad, 1).is_err(), "{bad}");
    }
}
