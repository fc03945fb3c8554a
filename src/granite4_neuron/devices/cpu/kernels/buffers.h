// Memory for results and scratch, kept for the next call: fresh pages from the system cost as much as the arithmetic of
// a short kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/alloc_cpu.h>

#include <map>
#include <mutex>
#include <numeric>

namespace granite4_neuron {

// Blocks that are free at present.
class Buffers {
 public:
  // The buffers of all threads. Never destroyed: tensors may return their memory when the process ends.
  static Buffers& instance() {
    static Buffers* buffers = new Buffers(size_t{64} << 20);
    return *buffers;
  }
  // The buffers of this thread alone: tasks of a few microseconds would wait for one another's lock.
  static Buffers& of_thread() {
    thread_local Buffers buffers(size_t{4} << 20);
    return buffers;
  }

  ~Buffers() {
    for (auto [size, data] : free_) c10::free_cpu(data);
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  struct Block {
    char* data;
    size_t size;
  };

  Block take(size_t bytes) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = free_.lower_bound(bytes);
      if (found != free_.end() && found->first <= 2 * bytes) {
        Block block{found->second, found->first};
        free_.erase(found);
        kept_ -= block.size;
        return block;
      }
    }
    return {static_cast<char*>(c10::alloc_cpu(bytes)), bytes};
  }

  void give_back(Block block) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (kept_ + block.size <= most_kept_) {
        kept_ += block.size;
        free_.emplace(block.size, block.data);
        return;
      }
    }
    c10::free_cpu(block.data);
  }

 private:
  explicit Buffers(size_t most_kept) : most_kept_(most_kept) {}

  const size_t most_kept_;  // bytes
  std::mutex mutex_;
  std::multimap<size_t, char*> free_;
  size_t kept_ = 0;
};

// As at::empty, contiguous.
inline at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  constexpr size_t LEAST = 64 * 1024;  // the C library itself keeps smaller blocks
  size_t bytes = c10::multiply_integers(sizes) * options.dtype().itemsize();
  if (bytes < LEAST) return at::detail::empty_cpu(sizes, options);
  auto block = Buffers::instance().take(bytes);
  return at::from_blob(block.data, sizes, [block](void*) { Buffers::instance().give_back(block); }, options);
}

// Room for `count` uninitialised values, for the time of a call.
template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : buffers_(count * sizeof(T) < MOST_OF_THREAD ? Buffers::of_thread() : Buffers::instance()),
        block_(buffers_.take(std::max<size_t>(1, count * sizeof(T)))) {}
  ~Scratch() {
    buffers_.give_back(block_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* data() const {
    return reinterpret_cast<T*>(block_.data);
  }

 private:
  static constexpr size_t MOST_OF_THREAD = size_t{1} << 20;  // bytes

  Buffers& buffers_;
  Buffers::Block block_;
};

}  // namespace granite4_neuron
