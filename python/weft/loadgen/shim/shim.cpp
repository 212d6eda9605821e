// MLPerf's LoadGen behind C functions. LoadGen's classes and strings have no stable binary
// interface, so this file is compiled together with its sources (`weft.loadgen.built`).
#include "shim.h"

#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "loadgen.h"
#include "query_dispatch_library.h"
#include "query_sample_library.h"
#include "test_settings.h"
#include "version.h"

namespace {

// The layouts agree, so arrays pass between Rust and LoadGen without a copy.
static_assert(sizeof(weft_sample) == sizeof(mlperf::QuerySample));
static_assert(offsetof(weft_sample, index) == offsetof(mlperf::QuerySample, index));
static_assert(sizeof(weft_response) == sizeof(mlperf::QuerySampleResponse));
static_assert(offsetof(weft_response, size) == offsetof(mlperf::QuerySampleResponse, size));
static_assert(offsetof(weft_response, n_tokens) == offsetof(mlperf::QuerySampleResponse, n_tokens));

class Sut : public mlperf::QueryDispatchLibrary {
 public:
  explicit Sut(const weft_callbacks& calls) : calls_(calls), name_(calls.sut_name) {}
  const std::string& Name() override { return name_; }
  void IssueQuery(const std::vector<mlperf::QuerySample>& samples) override {
    calls_.issue(calls_.context, reinterpret_cast<const weft_sample*>(samples.data()),
                 samples.size());
  }
  void FlushQueries() override { calls_.flush(calls_.context); }

 private:
  const weft_callbacks& calls_;
  std::string name_;
};

class Qsl : public mlperf::QuerySampleLibrary {
 public:
  explicit Qsl(const weft_callbacks& calls) : calls_(calls), name_(calls.qsl_name) {}
  const std::string& Name() override { return name_; }
  size_t TotalSampleCount() override { return calls_.total_samples; }
  size_t PerformanceSampleCount() override { return calls_.performance_samples; }
  void LoadSamplesToRam(const std::vector<mlperf::QuerySampleIndex>& samples) override {
    calls_.load(calls_.context, samples.data(), samples.size());
  }
  void UnloadSamplesFromRam(const std::vector<mlperf::QuerySampleIndex>& samples) override {
    calls_.unload(calls_.context, samples.data(), samples.size());
  }

 private:
  const weft_callbacks& calls_;
  std::string name_;
};

const char* scenario_name(mlperf::TestScenario scenario) {
  switch (scenario) {
    case mlperf::TestScenario::SingleStream: return "SingleStream";
    case mlperf::TestScenario::MultiStream: return "MultiStream";
    case mlperf::TestScenario::Server: return "Server";
    case mlperf::TestScenario::Offline: return "Offline";
  }
  return "";
}

// Copy every field of the C struct that `mlperf::TestSettings` has by the same name and type.
#define WEFT_FIELDS(each)                      \
  each(single_stream_expected_latency_ns)      \
  each(single_stream_target_latency_percentile)\
  each(multi_stream_expected_latency_ns)       \
  each(multi_stream_target_latency_percentile) \
  each(multi_stream_samples_per_query)         \
  each(server_target_qps)                      \
  each(server_target_latency_ns)               \
  each(server_target_latency_percentile)       \
  each(server_coalesce_queries)                \
  each(server_num_issue_query_threads)         \
  each(offline_expected_qps)                   \
  each(min_duration_ms)                        \
  each(max_duration_ms)                        \
  each(min_query_count)                        \
  each(max_query_count)                        \
  each(qsl_rng_seed)                           \
  each(sample_index_rng_seed)                  \
  each(schedule_rng_seed)                      \
  each(performance_sample_count_override)      \
  each(use_token_latencies)                    \
  each(server_ttft_latency)                    \
  each(server_tpot_latency)

mlperf::TestSettings to_loadgen(const weft_settings& from) {
  mlperf::TestSettings to{};
  to.scenario = static_cast<mlperf::TestScenario>(from.scenario);
  to.mode = static_cast<mlperf::TestMode>(from.mode);
#define WEFT_COPY(field) to.field = static_cast<decltype(to.field)>(from.field);
  WEFT_FIELDS(WEFT_COPY)
#undef WEFT_COPY
  return to;
}

// Error for a test whose query schedule does not fit into memory; the standard text names a C++
// type.
std::string no_memory() {
  return "LoadGen has not enough memory for the queries of this test, which it schedules before the start: reduce the "
         "rate, the least duration or the least number of queries";
}

const mlperf::QuerySampleResponse* answers(const weft_response* responses) {
  return reinterpret_cast<const mlperf::QuerySampleResponse*>(responses);
}

}  // namespace

extern "C" {

uint32_t weft_loadgen_abi(void) { return WEFT_LOADGEN_ABI; }

const char* weft_loadgen_version(void) {
  static const std::string version = mlperf::LoadgenVersion();
  return version.c_str();
}

void weft_loadgen_defaults(weft_settings* settings) {
  const mlperf::TestSettings from{};
  settings->scenario = static_cast<int32_t>(from.scenario);
  settings->mode = static_cast<int32_t>(from.mode);
#define WEFT_COPY(field) settings->field = static_cast<decltype(settings->field)>(from.field);
  WEFT_FIELDS(WEFT_COPY)
#undef WEFT_COPY
}

int weft_loadgen_run(const weft_callbacks* callbacks, const weft_settings* settings,
                     const char* model, const char* user_conf, const char* audit,
                     const char* directory, char* error, size_t room) {
  std::string problem;
  try {
    mlperf::TestSettings requested = to_loadgen(*settings);
    if (user_conf != nullptr) {
      const int refused =
          requested.FromConfig(user_conf, model, scenario_name(requested.scenario));
      if (refused != 0) {
        problem = std::string("LoadGen refuses ") + user_conf + " (code " +
                  std::to_string(refused) + ")";
      }
    }
    if (problem.empty()) {
      mlperf::LogSettings log;
      log.log_output.outdir = directory;
      log.enable_trace = false;
      Sut sut(*callbacks);
      Qsl qsl(*callbacks);
      mlperf::StartTest(&sut, &qsl, requested, log, audit);
      return 0;
    }
  } catch (const std::bad_alloc&) {
    problem = no_memory();
  } catch (const std::length_error&) {
    problem = no_memory();
  } catch (const std::exception& thrown) {
    problem = std::string("LoadGen: ") + thrown.what();
  } catch (...) {
    problem = "LoadGen threw an unknown exception";
  }
  if (room > 0) {
    std::strncpy(error, problem.c_str(), room - 1);
    error[room - 1] = '\0';
  }
  return -1;
}

void weft_loadgen_complete(const weft_response* responses, size_t count) {
  mlperf::QuerySamplesComplete(const_cast<mlperf::QuerySampleResponse*>(answers(responses)), count);
}

void weft_loadgen_first_token(const weft_response* responses, size_t count) {
  mlperf::FirstTokenComplete(const_cast<mlperf::QuerySampleResponse*>(answers(responses)), count);
}

void weft_loadgen_register_thread(void) { mlperf::RegisterIssueQueryThread(); }
}
