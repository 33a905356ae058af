/* SPDX-License-Identifier: Apache-2.0
 * A team of workers inside one OpenMP parallel region that lasts as long as the team.
 *
 * gdn_team_create starts one plain thread, the conductor. It enters the region and is its thread 0; every thread of the
 * region is a worker that waits for jobs until the team ends. So the workers belong to the conductor: the caller's own
 * OpenMP pool, settings and binding are never involved, whatever runtime it uses and wherever it calls from.
 *
 * Words that threads wait on are gates: a value that only grows and a count of those asleep on it. A job goes out
 * through one gate and its end comes back through another, each on a cache line of its own. All ordering is by C11
 * atomics, none by fences, so that ThreadSanitizer sees it although it does not see into the OpenMP runtime. */
#define _GNU_SOURCE 1
#include "platform.h"

#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <xmmintrin.h>

/* How long a waiting thread spins before it sleeps: bridges the engine's work between two layers' calls. */
#define SPIN_NS 100000
/* Spins between looks at the clock, which cost about 25 ns; fewer where threads take turns on a processing unit. Empty
 * jobs on 2 workers and 2 units took 5.8 us with 64, 3.5 with 16, 2.7 with 1, but barriers want the spins (Zen 4). */
#define SPINS_PER_LOOK 64
#define SPINS_PER_TURN 16
/* The caller's, where workers stand on every unit it might use: it gives way after each look. Jobs of 2 workers on 2
 * units, 0, 5, 20, 100 and 1000 us long without the caller's share (Zen 4, medians of 120, interleaved):
 *   gives way after each spin, 100 us      3.4   7.8  21.3   93.5   913
 *   after 16 spins, 100 us                 3.8   8.2  21.7   95.1   921
 *   after 16 spins, 5 us                   3.7   8.2  21.7   94.9   921
 *   sleeps at once                         4.7   9.2  22.6   96.5   920
 *   never gives way, 5 us                 12.7  17.1  30.6  102.8   928
 * So giving way keeps the worker's time whole, and sleeping sooner saves nothing; but where the caller has a unit for
 * itself, sleeping at once costs 4 us a call. */
#define SPINS_PER_CALLER_TURN 1
/* A caller that gives way on a unit that others keep busy, the workers of another context say, may get it back late: it
 * notes how late it returned, and where that is more than a wake-up takes, it sleeps at once instead if that is sooner.
 * Averages take in a new return by its share and forget while they are not added to, so that both ways are tried again.
 * Jobs of 30 us from a unit that a thread keeps busy took 3.8 to 5.4 ms each, so 0.06 to 0.13 ms (Zen 4). Two contexts
 * of one worker each on 2 units with calls of 70 us are better off giving way: 9 us late against 15 us. */
#define LATE_NS 10000
#define RETURN_SHARE 64
#define FORGET_SHARE 512
/* How long to wait for the kernel to be rid of threads that have ended; it takes about 50 us. */
#define GONE_NS 1000000000
#define MXCSR_DEFAULT 0x1f80 /* round to nearest, no exceptions, subnormals kept */

/* As many processing units as Linux can be built for on x86-64. */
#define MAX_CPUS 8192

typedef cpu_set_t cpu_mask[MAX_CPUS / CPU_SETSIZE];

struct gate {
  _Atomic uint32_t value;
  _Atomic uint32_t n_asleep;
};

struct gdn_team {
  int n;
  /* Spins of a waiting thread before it gives its processing unit away; 0 = it keeps it. For workers between jobs, the
   * caller during a job, workers inside a job. */
  int job_turn, done_turn, barrier_turn;
  int threads_end; /* the runtime ends its threads with the conductor, else it keeps them for later regions */
  const struct gdn_topo *topo; /* during create only, as is pin */
  int pin;
  pthread_t conductor;
  sigset_t caller_signals;
  cpu_mask caller_cpus;
  int caller_cpus_known;
  _Atomic int n_bound, bind_errno;
  _Atomic int status;                       /* errno of the start */
  alignas(GDN_ALIGN_BYTES) struct gate job; /* one more for every job; fn and arg are written before */
  gdn_team_fn fn;                           /* null: leave the region */
  void *arg;
  int64_t late_ns[2]; /* how late the caller returned, on average: giving way, sleeping at once */
  alignas(GDN_ALIGN_BYTES) struct gate done; /* follows job */
  alignas(GDN_ALIGN_BYTES) _Atomic uint32_t n_running;
  int64_t done_ns; /* when the last worker was done; here because no one spins on this line, written before done */
  alignas(GDN_ALIGN_BYTES) struct gate phase; /* one more for every barrier */
  alignas(GDN_ALIGN_BYTES) _Atomic uint32_t n_arrived;
  alignas(GDN_ALIGN_BYTES) struct gate n_started;
  _Atomic uint32_t n_left;
  pid_t tids[]; /* [n] */
};

/* ---- callers ---- */

void gdn_caller_enter(struct gdn_caller *caller) {
  caller->error = errno;
  caller->mxcsr = _mm_getcsr();
  _mm_setcsr(MXCSR_DEFAULT);
}

void gdn_caller_leave(const struct gdn_caller *caller) {
  _mm_setcsr(caller->mxcsr);
  errno = caller->error;
}

/* ---- gates ---- */

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The raise comes before the look at n_asleep in the one order of sequentially consistent operations; a waiter counts
 * itself asleep before it looks at the value. One of the two sees the other. */
static void gate_raise(struct gate *gate) {
  atomic_fetch_add(&gate->value, 1);
  if (atomic_load(&gate->n_asleep) > 0) syscall(SYS_futex, &gate->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static void gate_sleep(struct gate *gate, uint32_t old) {
  atomic_fetch_add(&gate->n_asleep, 1);
  while (atomic_load(&gate->value) == old) syscall(SYS_futex, &gate->value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
  atomic_fetch_sub(&gate->n_asleep, 1);
}

/* Returns once the value is no longer old: the time of the last look at the clock before, 0 = there was none, -1 = it
 * slept. turn: see struct gdn_team. */
static int64_t gate_wait(struct gate *gate, uint32_t old, int turn) {
  const int n_spins = turn > 0 ? turn : SPINS_PER_LOOK;
  int64_t start_ns = 0, look_ns = 0;
  for (;;) {
    for (int i = 0; i < n_spins; i++) {
      if (atomic_load_explicit(&gate->value, memory_order_acquire) != old) return look_ns;
      _mm_pause();
    }
    look_ns = now_ns();
    if (start_ns == 0) start_ns = look_ns;
    if (look_ns - start_ns >= SPIN_NS) break;
    if (turn > 0) sched_yield();
  }
  gate_sleep(gate, old);
  return -1;
}

/* ---- workers ---- */

/* What a thread had before it became a worker. LLVM's runtime keeps the threads of a region for other regions of the
 * process, so a worker leaves everything as a thread of the caller would have it. */
struct guest {
  sigset_t signals;
  cpu_mask cpus;
  int cpus_known;
  unsigned mxcsr;
};

/* Signals are the host's affair, but a fault must still reach its handler. */
static void blocked_signals(sigset_t *set) {
  sigfillset(set);
  sigdelset(set, SIGSEGV);
  sigdelset(set, SIGBUS);
  sigdelset(set, SIGFPE);
  sigdelset(set, SIGILL);
  sigdelset(set, SIGTRAP);
  sigdelset(set, SIGABRT);
}

/* OMP_PROC_BIND and its relatives may have bound this thread already, so an unbound worker is set free by force. */
static void place_worker(struct gdn_team *team, int worker) {
  int error = 0;
  if (team->topo && team->pin) {
    error = gdn_topo_bind_self(team->topo, worker);
    if (error == 0) {
      atomic_fetch_add(&team->n_bound, 1);
      return;
    }
    atomic_store(&team->bind_errno, error);
  }
  if (team->topo)
    error = gdn_topo_limit_self(team->topo);
  else if (team->caller_cpus_known && sched_setaffinity(0, sizeof team->caller_cpus, team->caller_cpus) < 0)
    error = errno;
  if (error != 0) atomic_store(&team->bind_errno, error);
}

static void worker_enter(struct gdn_team *team, int worker, struct guest *guest) {
  sigset_t blocked;
  blocked_signals(&blocked);
  pthread_sigmask(SIG_SETMASK, &blocked, &guest->signals);
  memset(guest->cpus, 0, sizeof guest->cpus);
  guest->cpus_known = sched_getaffinity(0, sizeof guest->cpus, guest->cpus) == 0;
  guest->mxcsr = _mm_getcsr();
  _mm_setcsr(MXCSR_DEFAULT);
  place_worker(team, worker);
  team->tids[worker] = (pid_t)syscall(SYS_gettid);
}

static void worker_leave(struct gdn_team *team, const struct guest *guest) {
  _mm_setcsr(guest->mxcsr);
  if (guest->cpus_known) sched_setaffinity(0, sizeof guest->cpus, guest->cpus);
  /* A thread that was made for this region had its signals blocked by the conductor. */
  const int made_here = sigismember(&guest->signals, SIGTERM) == 1 && sigismember(&guest->signals, SIGUSR1) == 1;
  pthread_sigmask(SIG_SETMASK, made_here ? &team->caller_signals : &guest->signals, NULL);
}

static void worker_loop(struct gdn_team *team, int worker) {
  for (uint32_t job = 1;; job++) {
    gate_wait(&team->job, job - 1, team->job_turn);
    const gdn_team_fn fn = team->fn;
    if (!fn) return;
    fn(team->arg, worker, team->n);
    if (atomic_fetch_sub(&team->n_running, 1) > 1) continue;
    team->done_ns = now_ns();
    gate_raise(&team->done);
  }
}

static void worker_main(struct gdn_team *team, int worker) {
  struct guest guest;
  worker_enter(team, worker, &guest);
  gate_raise(&team->n_started);
  worker_loop(team, worker);
  worker_leave(team, &guest);
  atomic_fetch_add(&team->n_left, 1);
}

/* ---- start and end ---- */

/* Waits, within bounds, until the kernel has forgotten an ended thread of this process: until then it counts against
 * limits and appears in /proc, and if nobody joined it, it may still run. */
static void wait_gone(pid_t tid) {
  const int64_t start_ns = now_ns();
  const struct timespec nap = {.tv_nsec = 20000};
  while (syscall(SYS_tgkill, getpid(), tid, 0) == 0 && now_ns() - start_ns < GONE_NS) nanosleep(&nap, NULL);
}

struct probe {
  struct gate end;
  struct probe_thread {
    struct probe *probe;
    pthread_t thread;
    pid_t tid;
  } threads[];
};

static void *probe_main(void *arg) {
  struct probe_thread *self = arg;
  self->tid = (pid_t)syscall(SYS_gettid);
  gate_sleep(&self->probe->end, 0);
  return NULL;
}

/* Whether the system gives n more threads. Asked first because both runtimes end the process when it does not. */
static int probe_threads(int n) {
  struct probe *probe = calloc(1, sizeof *probe + (size_t)n * sizeof *probe->threads);
  if (!probe) return ENOMEM;
  int error = 0, n_made = 0;
  while (n_made < n && error == 0) {
    struct probe_thread *t = &probe->threads[n_made];
    t->probe = probe;
    error = pthread_create(&t->thread, NULL, probe_main, t);
    if (error == 0) n_made++;
  }
  gate_raise(&probe->end);
  for (int i = 0; i < n_made; i++) pthread_join(probe->threads[i].thread, NULL);
  for (int i = 0; i < n_made; i++) wait_gone(probe->threads[i].tid);
  free(probe);
  return error;
}

/* Keeps the OpenMP runtime loaded for good. Nobody joins GNU's threads, which end on their own after the conductor, and
 * LLVM's stay: unloading this library, perhaps the runtime's only user, must not pull the code from under them.
 * gdn_team_destroy waits for GNU's besides, so that no thread is left either. LLVM's is known by a name of its own. */
static void pin_runtime(struct gdn_team *team) {
  Dl_info info;
  team->threads_end = 1;
  if (!dladdr((void *)(uintptr_t)omp_get_thread_num, &info)) return;
  void *runtime = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
  if (!runtime) {
    dlerror();
    return;
  }
  if (dlsym(runtime, "kmp_get_blocktime"))
    team->threads_end = 0;
  else
    dlerror();
  dlclose(runtime);
}

static void refuse(struct gdn_team *team) {
  atomic_store(&team->status, EPERM);
  gate_raise(&team->n_started);
}

static void *conductor_main(void *arg) {
  struct gdn_team *team = arg;
  if (omp_get_thread_limit() < team->n) { /* the region would find out too, but LLVM's runtime prints a warning */
    refuse(team);
    return NULL;
  }
  omp_set_dynamic(0);
#pragma omp parallel num_threads(team->n)
  {
    if (omp_get_num_threads() == team->n)
      worker_main(team, omp_get_thread_num());
    else if (omp_get_thread_num() == 0)
      refuse(team);
  }
  return NULL;
}

static int start_conductor(struct gdn_team *team) {
  int error = probe_threads(team->n);
  if (error == 0) error = pthread_create(&team->conductor, NULL, conductor_main, team);
  if (error != 0) return error;
  for (;;) {
    const uint32_t n_started = atomic_load(&team->n_started.value);
    if (n_started == (uint32_t)team->n || atomic_load(&team->status) != 0) break;
    gate_sleep(&team->n_started, n_started);
  }
  error = atomic_load(&team->status);
  if (error != 0) pthread_join(team->conductor, NULL);
  return error;
}

/* Between jobs, whoever waits lets others run: the caller may stand on the very unit that a worker is bound to, and one
 * of them spinning to the end would keep the other from running (a call of 20 us took 126). Inside a job only a team
 * larger than its units needs that; giving way there would hand the host's other threads whole time slices. */
static void set_turns(struct gdn_team *team) {
  int n_cpus = team->caller_cpus_known ? CPU_COUNT_S(sizeof team->caller_cpus, team->caller_cpus) : 1;
  if (team->topo && gdn_topo_n_units(team->topo) < n_cpus) n_cpus = gdn_topo_n_units(team->topo);
  team->job_turn = team->n + 1 > n_cpus ? SPINS_PER_TURN : SPINS_PER_LOOK;
  team->done_turn = team->n + 1 > n_cpus ? SPINS_PER_CALLER_TURN : SPINS_PER_TURN;
  team->barrier_turn = team->n > n_cpus ? SPINS_PER_TURN : 0;
}

int gdn_team_create(struct gdn_team **team_out, int n, const struct gdn_topo *topo, int pin) {
  if (n < 1) return EINVAL;
  const int caller_errno = errno;
  const size_t bytes = sizeof(struct gdn_team) + (size_t)n * sizeof(pid_t);
  struct gdn_team *team = gdn_mem_alloc(bytes);
  if (!team) return ENOMEM;
  memset(team, 0, bytes);
  team->n = n;
  team->topo = topo;
  team->pin = pin;
  team->caller_cpus_known = sched_getaffinity(0, sizeof team->caller_cpus, team->caller_cpus) == 0;
  set_turns(team);
  pin_runtime(team);
  sigset_t blocked;
  blocked_signals(&blocked);
  pthread_sigmask(SIG_SETMASK, &blocked, &team->caller_signals);
  const int error = start_conductor(team);
  pthread_sigmask(SIG_SETMASK, &team->caller_signals, NULL);
  team->topo = NULL;
  if (error == 0)
    *team_out = team;
  else
    gdn_mem_free(team);
  errno = caller_errno;
  return error;
}

void gdn_team_destroy(struct gdn_team *team) {
  if (!team) return;
  const int caller_errno = errno;
  team->fn = NULL;
  gate_raise(&team->job);
  pthread_join(team->conductor, NULL);
  while (atomic_load(&team->n_left) < (uint32_t)team->n) sched_yield();
  for (int i = 0; i < (team->threads_end ? team->n : 1); i++) wait_gone(team->tids[i]);
  gdn_mem_free(team);
  errno = caller_errno;
}

int gdn_team_size(const struct gdn_team *team) {
  return team->n;
}

int gdn_team_n_bound(const struct gdn_team *team, int *bind_errno) {
  if (bind_errno) *bind_errno = atomic_load(&team->bind_errno);
  return atomic_load(&team->n_bound);
}

/* ---- jobs ---- */

static void wait_done(struct gdn_team *team, uint32_t before) {
  int64_t *late_ns = team->late_ns;
  const int sleeps = late_ns[0] > LATE_NS && late_ns[0] > late_ns[1];
  int64_t look_ns = 0, ns;
  if (sleeps) {
    gate_sleep(&team->done, before);
    ns = now_ns();
  } else {
    look_ns = gate_wait(&team->done, before, team->done_turn);
    ns = look_ns > 0 ? now_ns() : look_ns;
    if (ns < 0) return;
  }
  const int64_t this_ns = ns - look_ns > LATE_NS ? ns - team->done_ns : 0;
  late_ns[sleeps] += (this_ns - late_ns[sleeps]) / RETURN_SHARE;
  late_ns[!sleeps] -= late_ns[!sleeps] / FORGET_SHARE;
}

void gdn_team_run(struct gdn_team *team, gdn_team_fn fn, void *arg) {
  const int caller_errno = errno;
  const uint32_t before = atomic_load_explicit(&team->done.value, memory_order_relaxed);
  team->fn = fn;
  team->arg = arg;
  atomic_store_explicit(&team->n_running, (uint32_t)team->n, memory_order_relaxed);
  gate_raise(&team->job);
  wait_done(team, before);
  errno = caller_errno;
}

void gdn_team_barrier(struct gdn_team *team) {
  const uint32_t phase = atomic_load_explicit(&team->phase.value, memory_order_relaxed);
  if (atomic_fetch_add(&team->n_arrived, 1) + 1 < (uint32_t)team->n) {
    gate_wait(&team->phase, phase, team->barrier_turn);
    return;
  }
  atomic_store_explicit(&team->n_arrived, 0, memory_order_relaxed);
  gate_raise(&team->phase);
}
