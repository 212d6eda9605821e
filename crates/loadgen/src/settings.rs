//! Test settings.

/// Sample order and times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Scenario {
    /// One sample at a time, each after the answer to the last.
    SingleStream,
    /// Queries with several samples, each after the last answer.
    MultiStream,
    /// Single-sample queries at Poisson-distributed times.
    Server,
    /// All samples in one query.
    Offline,
}

/// Run kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Mode {
    /// Accuracy, then performance.
    Submission,
    /// Answers for every sample, written to a log.
    Accuracy,
    /// Speed.
    Performance,
    /// The highest Server rate.
    FindPeakPerformance,
}

/// Test settings, with the names in LoadGen's `TestSettings`. [`crate::LoadGen::settings`] returns
/// LoadGen's defaults. A `user.conf` may change them, for example `*.Server.target_qps = 100`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Settings {
    /// Scenario.
    pub scenario: Scenario,
    /// Mode.
    pub mode: Mode,
    /// Expected latency, nanoseconds.
    pub single_stream_expected_latency_ns: f64,
    /// Latency percentile that is the result, from 0 to 1.
    pub single_stream_target_latency_percentile: f64,
    /// Expected latency, nanoseconds.
    pub multi_stream_expected_latency_ns: f64,
    /// Latency percentile that is the result, from 0 to 1.
    pub multi_stream_target_latency_percentile: f64,
    /// Samples per query.
    pub multi_stream_samples_per_query: u64,
    /// Queries a second.
    pub server_target_qps: f64,
    /// Latency limit, nanoseconds.
    pub server_target_latency_ns: u64,
    /// Percentile to which the limit applies, from 0 to 1.
    pub server_target_latency_percentile: f64,
    /// 1: queries that are due together are issued in one call.
    pub server_coalesce_queries: i32,
    /// Threads that issue queries; 0: LoadGen's own.
    pub server_num_issue_query_threads: u64,
    /// Expected samples a second, which determine how many are issued.
    pub offline_expected_qps: f64,
    /// Least duration, milliseconds.
    pub min_duration_ms: u64,
    /// Most duration, milliseconds; 0: unlimited.
    pub max_duration_ms: u64,
    /// Minimum query count.
    pub min_query_count: u64,
    /// Most queries; 0: unlimited.
    pub max_query_count: u64,
    /// Seed for the samples to load.
    pub qsl_rng_seed: u64,
    /// Seed for the samples to issue.
    pub sample_index_rng_seed: u64,
    /// Seed for Server query times.
    pub schedule_rng_seed: u64,
    /// Samples in memory, if not the sample library's number; 0: that number.
    pub performance_sample_count_override: u64,
    /// 1: first-token and per-token latencies are measured.
    pub use_token_latencies: i32,
    /// Limit on the time to the first token, nanoseconds.
    pub server_ttft_latency: u64,
    /// Limit on the time per further token, nanoseconds.
    pub server_tpot_latency: u64,
}
