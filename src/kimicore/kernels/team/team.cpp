// A team of threads for each thread that calls kernels. OpenMP's runtime puts its threads to sleep at once where a process
// has more of them than processors, as soon as two threads have used it; a kernel of 100 microseconds then waits about as
// long for its helpers to wake. These helpers look out for work for a while before they sleep.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>
#include <unistd.h>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace {
using namespace std::chrono;
constexpr auto LOOKOUT = microseconds(200);  // longer than Python takes from one kernel to the next
constexpr auto PATIENCE = microseconds(50);  // then the caller lets others run while its last helper ends
constexpr int GLANCES = 64;                  // between two looks at the clock
constexpr unsigned MOST = 1024;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}
template <class F> bool within(steady_clock::duration limit, F&& done) {
  const auto end = steady_clock::now() + limit;
  do
    for (int i = 0; i < GLANCES; i++) {
      if (done()) return true;
      pause();
    }
  while (steady_clock::now() < end);
  return done();
}

struct alignas(64) Helper {
  std::thread thread;
  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<bool> asleep{false};
};

// The job's number times MOST, plus how many helpers take part: one word, so that a helper who is not asked, and may look
// late, never takes one job's number for another's members.
struct Team {
  alignas(64) std::atomic<uint64_t> job{0};
  alignas(64) std::atomic<unsigned> busy{0};
  void (*fn)(void*) = nullptr;
  void* data = nullptr;
  std::atomic<bool> ending{false};
  std::vector<std::unique_ptr<Helper>> helpers;
  const pid_t process = getpid();

  void help(Helper& self, unsigned index, uint64_t seen) {
    for (;;) {
      if (!within(LOOKOUT, [&] { return job.load(std::memory_order_acquire) != seen; })) {
        std::unique_lock<std::mutex> lock(self.mutex);
        self.asleep.store(true);
        self.wake.wait(lock, [&] { return job.load() != seen; });
        self.asleep.store(false);
      }
      seen = job.load(std::memory_order_acquire);
      if (ending.load(std::memory_order_relaxed)) return;
      if (index >= seen % MOST) continue;
      fn(data);
      busy.fetch_sub(1, std::memory_order_release);
    }
  }
  void grow(unsigned count) {
    while (helpers.size() < count) {
      auto one = std::make_unique<Helper>();
      Helper& self = *one;
      helpers.push_back(std::move(one));
      try {
        self.thread = std::thread(&Team::help, this, std::ref(self), (unsigned)helpers.size() - 1, job.load());
      } catch (const std::system_error&) {  // the process may have no more threads: fewer do the work
        helpers.pop_back();
        return;
      }
    }
  }
  void post(unsigned members) {
    job.store((job.load(std::memory_order_relaxed) / MOST + 1) * MOST + members);
    for (unsigned i = 0; i < helpers.size() && (i < members || ending); i++)
      if (helpers[i]->asleep.load()) {
        std::lock_guard<std::mutex> lock(helpers[i]->mutex);
        helpers[i]->wake.notify_one();
      }
  }
  void run(void (*call)(void*), void* with, unsigned threads) {
    const unsigned wanted = (threads < MOST ? threads : MOST) - 1;
    if (helpers.size() < wanted) grow(wanted);
    const unsigned members = helpers.size() < wanted ? (unsigned)helpers.size() : wanted;
    fn = call;
    data = with;
    busy.store(members, std::memory_order_relaxed);
    post(members);
    call(with);
    const auto done = [&] { return busy.load(std::memory_order_acquire) == 0; };
    if (within(PATIENCE, done)) return;
    for (int turns = 0; !done(); turns++)
      if (turns < GLANCES) std::this_thread::yield();
      else std::this_thread::sleep_for(PATIENCE);
  }
  ~Team() {
    ending = true;
    post(0);
    for (auto& one : helpers) one->thread.join();
  }
};

struct Mine {
  Team* team = nullptr;
  // In a process forked from the team's there are no helpers: what is left of them is let be.
  Team& get() {
    if (!team || team->process != getpid()) team = new Team;
    return *team;
  }
  ~Mine() {
    if (team && team->process == getpid()) delete team;
  }
};
thread_local Mine mine;
}  // namespace

// fn(data) on the calling thread and up to threads - 1 others; returns when all are done.
extern "C" void kimicore_team(void (*fn)(void*), void* data, unsigned threads) {
  if (threads > 1) mine.get().run(fn, data, threads);
  else fn(data);
}
