#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <nlohmann/json.hpp>
#include <torch/version.h>

#include "device/topology.h"
#include "offload/device_speed.h"
#include "zeropage/bytes.h"
#include "zeropage/check.h"
#include "zeropage/plan.h"
#include "zeropage/world.h"

namespace zeropage {
namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

constexpr double kSecondsOfAFigure = 0.4;

// The fastest of as many calls as the time has, after one that is not counted.
template <typename Call>
double seconds_of(const Call& call) {
  call();
  double fastest = 0;
  const auto begin = Clock::now();
  do {
    const auto start = Clock::now();
    call();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    fastest = fastest == 0 ? seconds : std::min(fastest, seconds);
  } while (std::chrono::duration<double>(Clock::now() - begin).count() < kSecondsOfAFigure);
  return fastest;
}

double measure_products(c10::ScalarType dtype) {
  constexpr int64_t kRows = 512, kInner = 512, kColumns = 2048;
  const at::Tensor left = at::ones({kRows, kInner}, dtype);
  const at::Tensor right = at::ones({kInner, kColumns}, dtype);
  at::Tensor result = at::empty({kRows, kColumns}, dtype);
  const double seconds = seconds_of([&] { at::mm_out(result, left, right); });
  return 2.0 * kRows * kInner * kColumns / seconds;
}

double measure_elementwise(c10::ScalarType dtype) {
  constexpr int64_t kNumel = int64_t{1} << 20;
  const at::Tensor input = at::ones({kNumel}, dtype);
  const double seconds = seconds_of([&] { at::gelu(input); });
  return 2.0 * static_cast<double>(input.nbytes()) / seconds;
}

double measure_memory() {
  constexpr int64_t kNumel = int64_t{8} << 20;
  at::Tensor sum = at::ones({kNumel});
  const at::Tensor term = at::ones({kNumel});
  const double seconds = seconds_of([&] { sum.add_(term); });
  return 3.0 * static_cast<double>(sum.nbytes()) / seconds;
}

// Two ranks, as threads.
comm::Link measure_link() {
  comm::Link link;
  comm::World::threads(2, [&](comm::World& world) {
    const auto of_gather = [&](int64_t numel) {
      const at::Tensor whole = at::zeros({numel});
      // Both ranks are to measure as often.
      constexpr int kCalls = 20;
      double fastest = 0;
      for (int call = 0; call < kCalls; ++call) {
        const auto start = Clock::now();
        world.communicator().all_gather(whole, "the speed of links").wait();
        const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
        fastest = call < 2 ? seconds : std::min(fastest, seconds);
      }
      return fastest;
    };
    constexpr int64_t kShort = 256, kLong = int64_t{4} << 20;
    const double latency = of_gather(kShort);
    const double of_long = of_gather(kLong);
    if (world.rank() != 0) return;
    constexpr int64_t kSent = kLong / 2 * sizeof(float);
    link = {.latency_seconds = latency,
            .bytes_per_second = static_cast<double>(kSent) / std::max(1e-9, of_long - latency)};
  });
  return link;
}

std::string processor() {
  std::ifstream cpu_info("/proc/cpuinfo");
  for (std::string line; std::getline(cpu_info, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown processor";
}

std::string key_of(const MachineSpeedsOptions& options) {
  return c10::str(processor(), ", ", std::thread::hardware_concurrency(), " cores, ",
                  c10::toString(options.dtype), ", LibTorch ", TORCH_VERSION);
}

std::filesystem::path cache_of(const MachineSpeedsOptions& options) {
  if (!options.cache.empty()) return options.cache;
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache != nullptr && *cache != '\0') {
    return std::filesystem::path(cache) / "zeropage" / "machine_speeds.json";
  }
  const char* const home = std::getenv("HOME");
  return std::filesystem::path(home != nullptr ? home : ".") / ".cache" / "zeropage" /
         "machine_speeds.json";
}

json to_json(const MachineSpeeds& speeds) {
  return {{"product_flops_per_second", speeds.product_flops_per_second},
          {"elementwise_bytes_per_second", speeds.elementwise_bytes_per_second},
          {"memory_bytes_per_second", speeds.memory_bytes_per_second},
          {"link_latency_seconds", speeds.link.latency_seconds},
          {"link_bytes_per_second", speeds.link.bytes_per_second},
          {"cores", speeds.cores}};
}

MachineSpeeds of_json(const json& object) {
  MachineSpeeds speeds;
  speeds.product_flops_per_second = object.at("product_flops_per_second");
  speeds.elementwise_bytes_per_second = object.at("elementwise_bytes_per_second");
  speeds.memory_bytes_per_second = object.at("memory_bytes_per_second");
  speeds.link.latency_seconds = object.at("link_latency_seconds");
  speeds.link.bytes_per_second = object.at("link_bytes_per_second");
  speeds.cores = object.at("cores");
  return speeds;
}

// An object without entries where there is no file.
json read_cache(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) return json::object();
  json cached = json::parse(file, nullptr, /*allow_exceptions=*/false);
  ZP_CHECK(cached.is_object(), "the speeds of this machine in ", path.string(),
           ": expected a JSON object, as this program writes; remove the file");
  return cached;
}

void write_cache(const std::filesystem::path& path, const json& cached) {
  std::error_code error;
  std::filesystem::create_directories(path.parent_path(), error);
  const std::filesystem::path written = path.string() + "." + std::to_string(::getpid());
  std::ofstream file(written);
  file << cached.dump(1) << '\n';
  file.close();
  if (file.good()) std::filesystem::rename(written, path, error);
  if (!file.good() || error) {
    std::cerr << "zeropage: the speeds of this machine cannot be kept in " << path.string()
              << ", so they are measured each time\n";
  }
}

void measure_disk(const std::string& folder, MachineSpeeds& speeds) {
  if (folder.empty()) return;
  const offload::DeviceSpeed disk = offload::measure(folder);
  speeds.disk_read_bytes_per_second = disk.read_bytes_per_second;
  speeds.disk_write_bytes_per_second = disk.write_bytes_per_second;
}

}  // namespace

MachineSpeeds measure_machine(const MachineSpeedsOptions& options) {
  const at::NoGradGuard no_grad;
  const int threads = at::get_num_threads();
  MachineSpeeds speeds;
  speeds.link = measure_link();
  at::set_num_threads(1);
  speeds.product_flops_per_second = measure_products(options.dtype);
  speeds.elementwise_bytes_per_second = measure_elementwise(options.dtype);
  speeds.memory_bytes_per_second = measure_memory();
  at::set_num_threads(threads);
  speeds.cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  measure_disk(options.folder, speeds);
  return speeds;
}

MachineSpeeds machine_speeds(const MachineSpeedsOptions& options) {
  if (options.cache == "none") return measure_machine(options);
  const std::filesystem::path path = cache_of(options);
  const std::string key = key_of(options);
  json cached = read_cache(path);
  if (!cached.contains(key)) {
    MachineSpeedsOptions without_disk = options;
    without_disk.folder = "";
    cached[key] = to_json(measure_machine(without_disk));
    write_cache(path, cached);
  }
  MachineSpeeds speeds;
  try {
    speeds = of_json(cached[key]);
  } catch (const json::exception&) {
    ZP_THROW("the speeds of this machine in ", path.string(), ": the entry \"", key,
             "\" is not as this program writes it; remove the file");
  }
  measure_disk(options.folder, speeds);
  return speeds;
}

std::string to_string(const MachineSpeeds& speeds) {
  using memory::format_bytes;
  const auto rate = [](double bytes) { return format_bytes(static_cast<int64_t>(bytes)) + "/s"; };
  std::ostringstream out;
  out.precision(3);
  out << speeds.product_flops_per_second / 1e9 << " GFLOP/s of products, "
      << rate(speeds.elementwise_bytes_per_second) << " element by element, "
      << rate(speeds.memory_bytes_per_second) << " of memory a thread; "
      << rate(speeds.link.bytes_per_second) << " and " << speeds.link.latency_seconds * 1e6
      << " us between ranks of a host";
  if (speeds.disk_read_bytes_per_second > 0) {
    out << "; disk " << rate(speeds.disk_read_bytes_per_second) << " read, "
        << rate(speeds.disk_write_bytes_per_second) << " written";
  }
  return out.str();
}

}  // namespace zeropage
