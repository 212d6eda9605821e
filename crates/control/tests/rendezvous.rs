//! Rendezvous over real sockets: rejected connections, and the errors for rejected and missing ranks.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use weft_control::{Config, Control, Error, Rank, Result, Secret};

const LONG: Duration = Duration::from_secs(20);
/// Time limit for an early end on a busy machine, before [`LONG`].
const PROMPT: Duration = Duration::from_secs(10);

fn config(rank: u32, size: u32, port: u16) -> Config {
    let mut config = Config::new(rank, size);
    config.port = port;
    config.connect_timeout = LONG;
    config.secret = Some(Secret::new("apple").unwrap());
    config
}

/// Rank 0 on an ephemeral port.
fn rank_0(size: u32, adjust: impl Fn(&mut Config)) -> (u16, JoinHandle<Result<Control>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut config = config(0, size, port);
    adjust(&mut config);
    (port, std::thread::spawn(move || Control::connect_with_listener(config, listener)))
}

/// Checks that the real rank 1 still joins.
fn joins(port: u16, rank_0: JoinHandle<Result<Control>>) {
    let one = Control::connect(config(1, 2, port)).unwrap();
    let zero = rank_0.join().unwrap().unwrap();
    assert_eq!((zero.world_size(), one.rank()), (2, Rank(1)));
}

#[test]
fn garbage_on_the_port_disturbs_no_rank() {
    let (port, zero) = rank_0(2, |_| {});
    let mut open = Vec::new();
    for garbage in
        [b"GET / HTTP/1.1\r\n\r\n".as_slice(), &[0xff; 4096], &[0; 64], b"\x05\0\0\0\x80WEFT", b""]
    {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        // The listener may close the connection before all is written.
        let _ = stream.write_all(garbage);
        open.push(stream);
    }
    // All are closed while rank 0 waits: the last two once a hello has taken too long.
    open.into_iter().for_each(is_closed);
    joins(port, zero);
}

/// Waits until the other end closes a connection.
fn is_closed(mut stream: TcpStream) {
    stream.set_read_timeout(Some(PROMPT)).unwrap();
    let ended = stream.read_to_end(&mut Vec::new()).map_err(|error| error.kind());
    assert!(matches!(ended, Ok(_) | Err(ErrorKind::ConnectionReset)), "{ended:?}");
}

/// A frame that is too long by the length field closes the connection at once, not after the 5 s for a hello.
#[test]
fn an_endless_frame_is_refused_by_its_length() {
    let (port, zero) = rank_0(2, |_| {});
    let closed_after = |_| {
        let (since, mut stream) =
            (Instant::now(), TcpStream::connect(("127.0.0.1", port)).unwrap());
        stream.write_all(&1025u32.to_le_bytes()).unwrap();
        is_closed(stream);
        since.elapsed()
    };
    // A busy machine may take longer for some of them.
    let took = (0..3).map(closed_after).min().unwrap();
    assert!(took < Duration::from_secs(4), "{took:?}");
    joins(port, zero);
}

#[test]
fn many_silent_connections_delay_no_rank() {
    let (port, zero) = rank_0(2, |_| {});
    let idle: Vec<TcpStream> =
        (0..300).map_while(|_| TcpStream::connect(("127.0.0.1", port)).ok()).collect();
    let start = Instant::now();
    joins(port, zero);
    assert!(start.elapsed() < Duration::from_secs(4), "slower than a handshake's time");
    drop(idle);
}

#[test]
fn a_wrong_secret_is_named_to_the_dialer_and_the_real_rank_joins() {
    let (port, zero) = rank_0(2, |_| {});
    for secret in [Some(Secret::new("pear").unwrap()), None] {
        let since = Instant::now();
        let error = Control::connect(Config { secret, ..config(1, 2, port) }).unwrap_err();
        assert!(since.elapsed() < PROMPT, "{:?}", since.elapsed());
        assert!(matches!(error, Error::WrongSecret { peer: Rank(0), .. }), "{error}");
        assert!(error.to_string().contains("WEFT_SECRET"));
    }
    joins(port, zero);
}

#[test]
fn a_wrong_world_size_is_named_to_the_dialer() {
    let (port, zero) = rank_0(2, |_| {});
    let error = Control::connect(config(1, 3, port)).unwrap_err();
    assert!(matches!(error, Error::WrongWorldSize { ours: 3, theirs: 2, .. }), "{error}");
    joins(port, zero);
}

#[test]
fn a_second_process_with_the_same_rank_is_refused() {
    let (port, zero) = rank_0(3, |_| {});
    let first = std::thread::spawn(move || Control::connect(config(1, 3, port)));
    let second = std::thread::spawn(move || Control::connect(config(1, 3, port)));
    // One is refused while the other waits for rank 2.
    while !first.is_finished() && !second.is_finished() {
        std::thread::yield_now();
    }
    let two = std::thread::spawn(move || Control::connect(config(2, 3, port)));
    let results = [first.join().unwrap(), second.join().unwrap()];
    let refused = |r: &&Result<Control>| matches!(r, Err(Error::DuplicateRank { rank: Rank(1) }));
    assert_eq!(results.iter().filter(refused).count(), 1);
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
    two.join().unwrap().unwrap();
    zero.join().unwrap().unwrap();
}

/// Records a handshake between two real ranks and replays the dialer's frames.
#[test]
fn a_replayed_handshake_is_refused() {
    let (port, zero) = rank_0(2, |_| {});
    let wire = TcpListener::bind("127.0.0.1:0").unwrap();
    let tapped = wire.local_addr().unwrap().port();
    let tap = std::thread::spawn(move || {
        let (mut dialer, _) = wire.accept().unwrap();
        let mut acceptor = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let hello = frame(&mut dialer).unwrap();
        acceptor.write_all(&hello).unwrap();
        dialer.write_all(&frame(&mut acceptor).unwrap()).unwrap();
        // The proof is withheld: it is valid for this connection only.
        [hello, frame(&mut dialer).unwrap()]
    });
    let mut tricked = config(1, 2, tapped);
    tricked.connect_timeout = Duration::from_secs(3);
    let tricked = std::thread::spawn(move || Control::connect(tricked));
    let [hello, proof] = tap.join().unwrap();
    let mut replay = TcpStream::connect(("127.0.0.1", port)).unwrap();
    replay.write_all(&hello).unwrap();
    frame(&mut replay).unwrap();
    replay.write_all(&proof).unwrap();
    let response = frame(&mut replay).unwrap();
    assert_eq!(response[4..6], [0x84, 2], "a refusal: wrong secret");
    assert!(tricked.join().unwrap().is_err());
    joins(port, zero);
}

fn frame(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    stream.read_exact(&mut frame)?;
    let length = u32::from_le_bytes(frame[..4].try_into().unwrap()) as usize;
    frame.resize(4 + length, 0);
    stream.read_exact(&mut frame[4..])?;
    Ok(frame)
}

#[test]
fn the_errors_of_waiting_ranks_name_the_missing_ones() {
    let (port, zero) = rank_0(4, |config| config.connect_timeout = Duration::from_secs(2));
    let one = std::thread::spawn(move || Control::connect(config(1, 4, port)));
    let since = Instant::now();
    for waiting in [zero, one] {
        let error = waiting.join().unwrap().unwrap_err();
        assert!(since.elapsed() < PROMPT, "{:?}", since.elapsed());
        let Error::Rendezvous { missing, .. } = &error else { panic!("{error:?}") };
        assert_eq!(missing, &[Rank(2), Rank(3)], "{error}");
    }
}

#[test]
fn a_rank_may_start_before_rank_0() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let one = std::thread::spawn(move || Control::connect(config(1, 2, port)));
    std::thread::sleep(Duration::from_millis(50));
    let zero = Control::connect(config(0, 2, port)).unwrap();
    assert_eq!(one.join().unwrap().unwrap().world_size(), zero.world_size());
}

/// Rank 0 starts shortly before rank 1's deadline, and rank 2 never does.
#[test]
fn one_deadline_covers_all_phases_of_joining() {
    const TIME: Duration = Duration::from_secs(2);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let zero = std::thread::spawn(move || {
        std::thread::sleep(TIME - Duration::from_millis(300));
        let mut late = config(0, 3, port);
        // Later than rank 1's deadline.
        late.connect_timeout = TIME + Duration::from_secs(1);
        Control::connect_with_listener(late, listener)
    });
    let mut one = config(1, 3, port);
    one.connect_timeout = TIME;
    let begin = Instant::now();
    let error = Control::connect(one).unwrap_err();
    assert!(begin.elapsed() < TIME + Duration::from_millis(2400), "{:?}", begin.elapsed());
    assert!(matches!(error, Error::Rendezvous { .. }), "{error}");
    assert!(zero.join().unwrap().is_err());
}

#[test]
fn without_rank_0_the_error_names_it() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut alone = config(1, 2, port);
    alone.connect_timeout = Duration::from_millis(200);
    let error = Control::connect(alone).unwrap_err();
    assert!(
        matches!(&error, Error::Rendezvous { missing, .. } if missing == &[Rank(0)]),
        "{error}"
    );
    assert!(error.to_string().contains("refused"), "{error}");
}

#[test]
fn a_name_without_an_address_is_named_at_the_deadline() {
    let mut alone = config(1, 2, 1);
    alone.host = "no-such-host.invalid".into();
    alone.connect_timeout = Duration::from_millis(300);
    let error = Control::connect(alone).unwrap_err();
    assert!(
        matches!(&error, Error::Resolve { host, .. } if host.starts_with("no-such")),
        "{error}"
    );
}

#[test]
fn a_port_in_use_names_the_remedy() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = Control::connect(config(0, 2, port)).unwrap_err();
    assert!(matches!(error, Error::PortInUse { .. }));
    assert!(error.to_string().contains("WEFT_PORT"));
}

#[test]
fn several_hosts_without_a_secret_are_refused() {
    let mut open = config(0, 2, 0);
    open.host = "10.0.0.1".into();
    open.secret = None;
    assert!(matches!(Control::connect(open), Err(Error::SecretMissing { .. })));
}

/// Connection in progress: a blocking connect would wait for 1 s on a full queue.
fn connect_without_waiting(port: u16) -> Option<OwnedFd> {
    use rustix::net::sockopt::set_socket_linger;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).ok()?;
    // A close resets the connection and frees the port at once, so that a flood does not run out of ports.
    set_socket_linger(&socket, Some(Duration::ZERO)).ok()?;
    let _ = connect(&socket, &SocketAddr::from(([127, 0, 0, 1], port)));
    Some(socket)
}

/// Threads that connect continuously, until the end.
#[test]
fn a_flood_of_connections_delays_no_deadline() {
    let patience = Duration::from_secs(1);
    let (port, zero) = rank_0(2, |config| config.connect_timeout = patience);
    let (start, stop) = (Instant::now(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut kept = VecDeque::new();
                while !stop.load(Ordering::Relaxed) && start.elapsed() < LONG {
                    kept.extend(connect_without_waiting(port));
                    if kept.len() > 100 {
                        kept.pop_front();
                    }
                    // Rank 0 finds the connections open, and waits for hellos.
                    std::thread::sleep(Duration::from_micros(200));
                }
            });
        }
        let error = zero.join().unwrap().unwrap_err();
        stop.store(true, Ordering::Relaxed);
        assert!(
            matches!(&error, Error::Rendezvous { missing, .. } if missing == &[Rank(1)]),
            "{error}"
        );
        assert!(start.elapsed() < patience + LONG / 2, "{:?}", start.elapsed());
    });
}

static LINES: AtomicUsize = AtomicUsize::new(0);

/// Log line counter about rejected connections.
struct Counting;

impl log::Log for Counting {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.level() <= log::Level::Warn
            && record.args().to_string().contains("connection rejected")
        {
            LINES.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self) {}
}

/// This process's resident memory, in bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

/// Hello with this version range, target rank and world size.
fn hello(versions: (u16, u16), target: u32, world_size: u32) -> Vec<u8> {
    let mut body = b"\x80WEFTCTRL".to_vec();
    body.extend(versions.0.to_le_bytes());
    body.extend(versions.1.to_le_bytes());
    for number in [1, target, world_size] {
        body.extend(number.to_le_bytes());
    }
    body.extend([0; 16 + 32]);
    [&(body.len() as u32).to_le_bytes()[..], &body].concat()
}

/// Ten thousand invalid connections of every kind, and some that send a hello byte by byte: the ranks join, memory
/// stays bounded, and each reason is logged once. Afterwards the ranks work, and the port is closed.
#[test]
fn ten_thousand_connections_delay_no_rank() {
    log::set_logger(&Counting).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let (port, zero) = rank_0(2, |config| config.connect_timeout = 3 * LONG);
    let before = resident();
    let stop = AtomicBool::new(false);
    let open = || TcpStream::connect(("127.0.0.1", port));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let slow: Vec<TcpStream> = (0..50).map_while(|_| open().ok()).collect();
            for byte in hello(weft_control::WIRE_VERSIONS, 0, 2).iter().take(40).cycle() {
                for mut socket in &slow {
                    let _ = socket.write_all(&[*byte]);
                }
                std::thread::sleep(Duration::from_millis(20));
                if stop.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let wrong: [Vec<u8>; 8] = [
            hello((99, 99), 0, 2),
            hello(weft_control::WIRE_VERSIONS, 7, 2),
            hello(weft_control::WIRE_VERSIONS, 0, 2)[..30].to_vec(),
            u32::MAX.to_le_bytes().to_vec(),
            1025u32.to_le_bytes().to_vec(),
            [&hello(weft_control::WIRE_VERSIONS, 0, 2)[..], &[33, 0, 0, 0, 0x82], &[7; 32]]
                .concat(),
            b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            vec![0; 64],
        ];
        // One thread each: a connect to a full queue waits for 1 s.
        std::thread::scope(|scope| {
            for bytes in wrong.iter().cycle().take(40) {
                scope.spawn(|| {
                    for _ in 0..250 {
                        let mut socket = open().unwrap();
                        let _ = socket.write_all(bytes);
                    }
                });
            }
        });
        let grown = resident().saturating_sub(before);
        assert!(grown < 64 << 20, "{grown} bytes for ten thousand connections");
        assert!(!zero.is_finished());
        let one = std::thread::spawn(move || Control::connect(config(1, 2, port)).unwrap());
        let (zero, one) = (zero.join().unwrap().unwrap(), one.join().unwrap());
        stop.store(true, Ordering::Relaxed);
        assert!(open().is_err(), "the port is still open");
        std::thread::scope(|scope| {
            let other = scope.spawn(|| one.all_gather(b"one", LONG).unwrap());
            assert_eq!(zero.all_gather(b"zero", LONG).unwrap(), other.join().unwrap());
        });
    });
    // Other tests in this file add a few reasons.
    let lines = LINES.load(Ordering::Relaxed);
    assert!((4..=80).contains(&lines), "{lines} lines for ten thousand connections");
}

/// A refusal for another version carries the supported one, which the dialler's error names.
#[test]
fn a_refused_version_comes_with_the_supported_one() {
    let (port, zero) = rank_0(2, |_| {});
    let mut newer = TcpStream::connect(("127.0.0.1", port)).unwrap();
    newer.write_all(&hello((99, 99), 0, 2)).unwrap();
    let response = frame(&mut newer).unwrap();
    assert_eq!(response[4..6], [0x84, 1], "a refusal: wrong version");
    assert_eq!(response[6..10], u32::from(weft_control::WIRE_VERSIONS.1).to_le_bytes());
    joins(port, zero);

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let newer = std::thread::spawn(move || {
        let (mut dialer, _) = listener.accept().unwrap();
        frame(&mut dialer).unwrap();
        let refusal = [&response[..6], &99u32.to_le_bytes(), &response[10..]].concat();
        dialer.write_all(&refusal).unwrap();
    });
    let since = Instant::now();
    let error = Control::connect(config(1, 2, port)).unwrap_err();
    assert!(since.elapsed() < PROMPT, "{:?}", since.elapsed());
    assert!(matches!(error, Error::WrongVersion { peer: Rank(0), theirs: 99, .. }), "{error}");
    newer.join().unwrap();
}
