// The time of a step, part by part.
#pragma once

#include "parallel.h"

namespace granite4_neuron {

enum class Part { products, experts, convolution, scan, attention, norms, head };

class Profile {
 public:
  static constexpr std::array NAMES{"products", "experts", "convolution", "scan", "attention", "norms and gates",
                                    "head and router"};
  // Wall time, and busy time summed over all threads.
  struct Times {
    double seconds = 0.0, busy_seconds = 0.0;
  };

  static Profile& instance() {
    static Profile profile;
    return profile;
  }
  // Turns profiling on or off, and returns the times since the last call.
  std::array<Times, NAMES.size()> take(bool on) {
    ThreadPool::instance().take_time(on);
    on_ = on;
    return std::exchange(times_, {});
  }

 private:
  friend class PartOfStep;
  bool on_ = false;
  std::array<Times, NAMES.size()> times_{};
};

// Adds the time of a scope to a part. Scopes do not nest, and are all on the one thread that calls the kernels.
class PartOfStep {
 public:
  explicit PartOfStep(Part part) : profile_(Profile::instance()), part_(part) {
    if (!profile_.on_) return;
    ThreadPool::instance().take_time(true);
    start_ = std::chrono::steady_clock::now();
  }
  ~PartOfStep() {
    if (!profile_.on_) return;
    int64_t all_ns = std::chrono::nanoseconds(std::chrono::steady_clock::now() - start_).count();
    auto [loop_ns, busy_ns] = ThreadPool::instance().take_time(true);
    auto& times = profile_.times_[static_cast<size_t>(part_)];
    times.seconds += 1e-9 * all_ns;
    times.busy_seconds += 1e-9 * (busy_ns + all_ns - loop_ns);  // between loops one thread works
  }
  PartOfStep(const PartOfStep&) = delete;
  PartOfStep& operator=(const PartOfStep&) = delete;

 private:
  Profile& profile_;
  Part part_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace granite4_neuron
