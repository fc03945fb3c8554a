// Measures how long one thread waits for the answer of another: a word in memory goes there and back.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int TRIPS = 500;

alignas(128) std::atomic<int> word;

// Returns whether the other thread writes `number` before `end`.
bool hears(int number, Clock::time_point end) {
    while (word.load(std::memory_order_acquire) != number) {
        if (Clock::now() > end) return false;
    }
    return true;
}

}  // namespace

// Returns the seconds of one round trip: the mean of 500 in a row, the best of as many such rows as fit into `seconds`.
// Returns infinity if none fits, as on one processor.
extern "C" double round_trip(double seconds) {
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    word = 0;
    std::thread other([&] {
        for (int number = 1; hears(number, end); number += 2) word.store(number + 1, std::memory_order_release);
    });
    double best = std::numeric_limits<double>::infinity();
    int number = 1;
    for (bool answers = true; answers;) {
        const auto started = Clock::now();
        for (int trip = 0; trip < TRIPS && answers; trip++, number += 2) {
            word.store(number, std::memory_order_release);
            answers = hears(number + 1, end);
        }
        if (answers) best = std::min(best, std::chrono::duration<double>(Clock::now() - started).count() / TRIPS);
    }
    other.join();
    return best;
}
