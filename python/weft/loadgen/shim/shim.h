// C interface to MLPerf's LoadGen, for Rust; see shim.cpp. Change both and `crates/loadgen/src/library.rs` at once.
#ifndef WEFT_LOADGEN_SHIM_H_
#define WEFT_LOADGEN_SHIM_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_LOADGEN_ABI 1
#define WEFT_LOADGEN_PUBLIC __attribute__((visibility("default")))

typedef struct {
  uintptr_t id;
  size_t index;
} weft_sample;

typedef struct {
  uintptr_t id;
  // Answer address and bytes, which LoadGen reads only during the call.
  uintptr_t data;
  size_t size;
  // 0: not a token sequence.
  int64_t n_tokens;
} weft_response;

// What LoadGen calls. Names live until `weft_loadgen_run` returns. No function may unwind.
typedef struct {
  void* context;
  const char* sut_name;
  void (*issue)(void* context, const weft_sample* samples, size_t count);
  void (*flush)(void* context);
  const char* qsl_name;
  size_t total_samples;
  size_t performance_samples;
  void (*load)(void* context, const size_t* indices, size_t count);
  void (*unload)(void* context, const size_t* indices, size_t count);
} weft_callbacks;

// Fields of mlperf::TestSettings by these names; enumerations in LoadGen's order.
typedef struct {
  int32_t scenario;
  int32_t mode;
  double single_stream_expected_latency_ns;
  double single_stream_target_latency_percentile;
  double multi_stream_expected_latency_ns;
  double multi_stream_target_latency_percentile;
  uint64_t multi_stream_samples_per_query;
  double server_target_qps;
  uint64_t server_target_latency_ns;
  double server_target_latency_percentile;
  int32_t server_coalesce_queries;
  uint64_t server_num_issue_query_threads;
  double offline_expected_qps;
  uint64_t min_duration_ms;
  uint64_t max_duration_ms;
  uint64_t min_query_count;
  uint64_t max_query_count;
  uint64_t qsl_rng_seed;
  uint64_t sample_index_rng_seed;
  uint64_t schedule_rng_seed;
  uint64_t performance_sample_count_override;
  int32_t use_token_latencies;
  uint64_t server_ttft_latency;
  uint64_t server_tpot_latency;
} weft_settings;

WEFT_LOADGEN_PUBLIC uint32_t weft_loadgen_abi(void);
// LoadGen's version.
WEFT_LOADGEN_PUBLIC const char* weft_loadgen_version(void);
WEFT_LOADGEN_PUBLIC void weft_loadgen_defaults(weft_settings* settings);

// Run one test. `user_conf` is a path or null; with one, LoadGen's own mlperf.conf is read for
// `model` and the scenario before it. `audit` is the path of audit.config, which need not exist.
// Returns 0, or -1 with a text of at most `room` bytes in `error`.
WEFT_LOADGEN_PUBLIC int weft_loadgen_run(const weft_callbacks* callbacks,
                                         const weft_settings* settings, const char* model,
                                         const char* user_conf, const char* audit,
                                         const char* directory, char* error, size_t room);
// From any thread, during a test.
WEFT_LOADGEN_PUBLIC void weft_loadgen_complete(const weft_response* responses, size_t count);
WEFT_LOADGEN_PUBLIC void weft_loadgen_first_token(const weft_response* responses, size_t count);
WEFT_LOADGEN_PUBLIC void weft_loadgen_register_thread(void);

#ifdef __cplusplus
}
#endif

#endif  // WEFT_LOADGEN_SHIM_H_
