// Python module with the shim: makes torch.distributed backends from a table of C functions, and has an operator.
#include "backend.hpp"
#include "operator.hpp"

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>

#include <set>

namespace weft {
namespace {

namespace py = pybind11;

// Backends in this process, closed when the program ends.
std::mutex registry_mutex;
std::vector<std::weak_ptr<Engine>> registry;

// Backends in this process that are alive.
std::vector<std::shared_ptr<Engine>> engines() {
  std::lock_guard<std::mutex> lock(registry_mutex);
  std::vector<std::shared_ptr<Engine>> alive;
  for (auto& each : registry) {
    if (auto engine = each.lock()) {
      alive.push_back(std::move(engine));
    }
  }
  return alive;
}

// Asks Python for a split group's backend, with the original group's settings.
intrusive_ptr<c10d::Backend> split(
    const intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout, const std::string& settings) {
  py::gil_scoped_acquire gil;
  py::object made = py::module_::import("weft.torch.backend").attr("split")(store, rank, size, timeout, settings);
  return made.cast<intrusive_ptr<c10d::Backend>>();
}

intrusive_ptr<c10d::Backend> create(
    uintptr_t table_address, uintptr_t context, Milliseconds timeout, std::string settings, py::object device) {
  auto table = reinterpret_cast<const weft_table*>(table_address);
  TORCH_CHECK(
      table->abi == WEFT_ABI, "weft: table of version ", table->abi, ": expected ", WEFT_ABI,
      "; delete the cache of the shim");
  auto engine = std::make_shared<Engine>(table, reinterpret_cast<void*>(context));
  std::lock_guard<std::mutex> lock(registry_mutex);
  registry.erase(
      std::remove_if(registry.begin(), registry.end(), [](auto& each) { return each.expired(); }), registry.end());
  registry.push_back(engine);
  auto backend = c10::make_intrusive<WeftBackend>(engine, timeout, std::move(settings), split, std::move(device));
  engine->start();
  return backend;
}

void close_all() {
  for (auto& engine : engines()) {
    engine->close("the program ended");
  }
}

void abort_all() {
  // Also without a group: one that is being formed ends.
  aborts += 1;
  for (auto& engine : engines()) {
    engine->abort();
  }
}

} // namespace
} // namespace weft

PYBIND11_MODULE(_weft_torch, module) {
  namespace py = pybind11;
  py::module_::import("torch._C._distributed_c10d");
  py::class_<weft::WeftBackend, c10::intrusive_ptr<weft::WeftBackend>, c10d::Backend>(module, "WeftBackend")
      // torch calls this on ranks outside a new group, if a device is bound to the default group.
      .def("perform_nocolor_split", [](weft::WeftBackend&, const py::object&) {});
  module.def(
      "create", &weft::create, py::arg("table"), py::arg("context"), py::arg("timeout"), py::arg("settings"),
      py::arg("device") = py::none());
  module.def("abort_all", &weft::abort_all, py::call_guard<py::gil_scoped_release>());
  module.def("aborts", [] { return weft::aborts.load(); });
  module.def("close_all", &weft::close_all, py::call_guard<py::gil_scoped_release>());
}
