// Many short tasks on a few threads, for steps of a few tokens, which run hundreds of loops in some milliseconds.
//
// at::parallel_for gives each thread its share and waits for all threads. A thread that another program keeps from
// running then holds up everything, in every loop: beside a single busy process a step takes fifty times as long. Here
// a thread that has finished its share steals from the others', and nobody waits for a thread that has not begun.
//
// Between two loops, while one thread does work that is too short to share, the others may prefetch what the next loop
// will read.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>

namespace granite4_neuron {

class ThreadPool {
 public:
  // That of all libraries, in weights.cpp.
  static ThreadPool& instance();

  // run(context, begin, end) over 0 to count, `grain` at a time, on as many threads as torch uses.
  void parallel_for(int64_t count, int64_t grain, void (*run)(const void*, int64_t, int64_t), const void* context) {
    int64_t helpers = std::min<int64_t>({at::get_num_threads(), MAX_THREADS, (count + grain - 1) / grain}) - 1;
    std::unique_lock<std::mutex> alone(in_use_, std::try_to_lock);
    if (!alone.owns_lock()) return run(context, 0, count);
    Stopwatch loop(this, &loop_ns_);
    if (helpers < 1) {
      Stopwatch busy(this, &busy_ns_);
      return run(context, 0, count);
    }
    for (; started_ < helpers; started_++) std::thread(&ThreadPool::help, this, started_).detach();
    run_ = run;
    context_ = context;
    count_ = count;
    grain_ = grain;
    helpers_.store(helpers, std::memory_order_relaxed);
    for (int64_t share = 0; share <= helpers; share++) shares_[share].next = share_begin(share);
    workers_.fetch_and(~CLOSED, std::memory_order_release);
    loop_.fetch_add(1, std::memory_order_release);
    loop_.notify_all();
    work(helpers);
    workers_.fetch_or(CLOSED, std::memory_order_acquire);
    while (workers_.load(std::memory_order_acquire) != CLOSED) relax();
  }

  // Turns the timing of loops on or off. Returns their times since the last call in nanoseconds: wall time, and busy
  // time summed over all threads.
  std::pair<int64_t, int64_t> take_time(bool on) {
    takes_time_.store(on, std::memory_order_relaxed);
    return {loop_ns_.exchange(0, std::memory_order_relaxed), busy_ns_.exchange(0, std::memory_order_relaxed)};
  }

  // Names the memory that a later loop will read, its tasks in the order of addresses. Idle helpers prefetch the
  // beginnings of their shares. A prefetch reads into caches only, so the memory may be freed by then.
  void prefetch_when_idle(const char* data, int64_t bytes) {
    prefetch_data_.store(data, std::memory_order_relaxed);
    prefetch_bytes_.store(bytes, std::memory_order_relaxed);
  }

 private:
  static constexpr int64_t MAX_THREADS = 256;
  // Per helper: more than that would evict what it prefetched first.
  static constexpr int64_t MAX_PREFETCH_BYTES = 1 << 20;
  static constexpr int64_t CLOSED = int64_t{1} << 32;
  // How long a helper without work spins before it sleeps: longer than Python takes between two calls.
  static constexpr std::chrono::microseconds SPIN_TIME{1000};

  std::mutex in_use_;
  int64_t started_ = 0;
  std::atomic<const char*> prefetch_data_{nullptr};
  std::atomic<int64_t> prefetch_bytes_{0};
  // The present loop: written only while no helper is inside.
  void (*run_)(const void*, int64_t, int64_t) = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0, grain_ = 1;
  std::atomic<int64_t> helpers_{0};
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
  };
  Share shares_[MAX_THREADS];
  // The number of helpers at work; the CLOSED bit: no new ones may enter. The counter of loops tells helpers that the
  // bit was cleared.
  alignas(64) std::atomic<int64_t> workers_{CLOSED};
  alignas(64) std::atomic<uint32_t> loop_{0};

  std::atomic<bool> takes_time_{false};
  std::atomic<int64_t> loop_ns_{0}, busy_ns_{0};

  // Adds the time of a scope, if the pool takes the time.
  class Stopwatch {
   public:
    Stopwatch(const ThreadPool* pool, std::atomic<int64_t>* total)
        : total_(pool->takes_time_.load(std::memory_order_relaxed) ? total : nullptr) {
      if (total_ != nullptr) start_ = std::chrono::steady_clock::now();
    }
    ~Stopwatch() {
      if (total_ == nullptr) return;
      auto time = std::chrono::steady_clock::now() - start_;
      total_->fetch_add(std::chrono::nanoseconds(time).count(), std::memory_order_relaxed);
    }
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;

   private:
    std::atomic<int64_t>* total_;
    std::chrono::steady_clock::time_point start_;
  };

  int64_t share_begin(int64_t share) const {
    return count_ * share / (helpers_ + 1);
  }

  // A share is one run of tasks, which for weights is one run of addresses; the next thread's is the first to steal
  // from.
  void work(int64_t number) {
    Stopwatch busy(this, &busy_ns_);
    int64_t shares = helpers_ + 1;
    for (int64_t turn = 0; turn < shares; turn++) {
      int64_t share = (number + turn) % shares, end = share_begin(share + 1);
      auto& next = shares_[share].next;
      while (next.load(std::memory_order_relaxed) < end) {
        int64_t begin = next.fetch_add(grain_, std::memory_order_relaxed);
        if (begin < end) run_(context_, begin, std::min(begin + grain_, end));
      }
    }
  }

  void help(int64_t number) {
    for (uint32_t seen = 0;;) {
      seen = wait_for_loop_after(seen, number);
      if (number >= helpers_.load(std::memory_order_relaxed)) continue;
      if ((workers_.fetch_add(1, std::memory_order_acquire) & CLOSED) == 0) work(number);
      workers_.fetch_sub(1, std::memory_order_release);
    }
  }

  uint32_t wait_for_loop_after(uint32_t seen, int64_t number) {
    auto until = std::chrono::steady_clock::now() + SPIN_TIME;
    auto [data, bytes] = share_to_prefetch(number);
    for (int64_t turn = 1;; turn++) {
      uint32_t now = loop_.load(std::memory_order_acquire);
      if (now != seen) return now;
      if (bytes > 0) {
        constexpr int64_t PART = 1024, LINE = 64;
        for (int64_t byte = 0; byte < PART; byte += LINE) __builtin_prefetch(data + byte, 0, 2);
        data += PART;
        bytes -= PART;
      }
      relax();
      if (turn % 64 == 0 && std::chrono::steady_clock::now() > until) loop_.wait(seen, std::memory_order_acquire);
    }
  }

  std::pair<const char*, int64_t> share_to_prefetch(int64_t number) const {
    int64_t bytes = prefetch_bytes_.load(std::memory_order_relaxed);
    int64_t shares = helpers_.load(std::memory_order_relaxed) + 1;
    const char* data = prefetch_data_.load(std::memory_order_relaxed);
    return {data + bytes * number / shares, number + 1 < shares ? std::min(bytes / shares, MAX_PREFETCH_BYTES) : 0};
  }

  static void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
};

// f(begin, end) for parts of 0 to count of `grain` at most, in any order and on any thread; f must not throw.
template <typename F>
inline void parallel_tasks(int64_t count, int64_t grain, const F& f) {
  auto run = [](const void* context, int64_t begin, int64_t end) { (*static_cast<const F*>(context))(begin, end); };
  ThreadPool::instance().parallel_for(count, grain, run, &f);
}

}  // namespace granite4_neuron
