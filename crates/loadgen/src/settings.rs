//! Settings of a test.

/// Order and times of the samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Scenario {
    /// One sample at a time, each after the answer to the last.
    SingleStream,
    /// A query of several samples at a time, each after the answer to the last.
    MultiStream,
    /// Queries of one sample at random times, of a Poisson process.
    Server,
    /// All samples in one query.
    Offline,
}

/// Kind of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Mode {
    /// Accuracy, then performance.
    Submission,
    /// Answers of every sample, written to a log.
    Accuracy,
    /// Speed.
    Performance,
    /// The highest rate of the server scenario.
    FindPeakPerformance,
}

/// Settings of a test, by the names of LoadGen's `TestSettings`; [`crate::LoadGen::settings`] returns
/// LoadGen's defaults. A `user.conf` may change them.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Settings {
    /// Scenario.
    pub scenario: Scenario,
    /// Mode.
    pub mode: Mode,
    /// Expected latency, nanoseconds.
    pub single_stream_expected_latency_ns: f64,
    /// Percentile of latency that is the result, of 1.
    pub single_stream_target_latency_percentile: f64,
    /// Expected latency, nanoseconds.
    pub multi_stream_expected_latency_ns: f64,
    /// Percentile of latency that is the result, of 1.
    pub multi_stream_target_latency_percentile: f64,
    /// Samples of a query.
    pub multi_stream_samples_per_query: u64,
    /// Queries a second.
    pub server_target_qps: f64,
    /// Limit of latency, nanoseconds.
    pub server_target_latency_ns: u64,
    /// Percentile to which the limit applies, of 1.
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
    /// Least number of queries.
    pub min_query_count: u64,
    /// Most queries; 0: unlimited.
    pub max_query_count: u64,
    /// Seed of the samples that are loaded.
    pub qsl_rng_seed: u64,
    /// Seed of the samples that are issued.
    pub sample_index_rng_seed: u64,
    /// Seed of the times of the server scenario.
    pub schedule_rng_seed: u64,
    /// Samples in memory, if not the sample library's number; 0: that number.
    pub performance_sample_count_override: u64,
    /// 1: first-token and per-token latencies are measured.
    pub use_token_latencies: i32,
    /// Limit of the time to the first token, nanoseconds.
    pub server_ttft_latency: u64,
    /// Limit of the time of each further token, nanoseconds.
    pub server_tpot_latency: u64,
}
