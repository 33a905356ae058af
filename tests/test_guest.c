/* SPDX-License-Identifier: Apache-2.0
 * A context inside someone else's threads: what callers find unchanged, where workers run, what idling costs. */
#define _GNU_SOURCE 1
#include "guest.h"

#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <immintrin.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "check.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static int setup(void);

enum { MAX_WORKERS = 1024, EXIT_SKIP = 77 };

static const gdn_interface *gdn;
static struct guest_work work;
static uint64_t expected[GUEST_N_CALLS];

static gdn_ctx *make_ctx(const gdn_ctx_args *args) {
  gdn_ctx *ctx = NULL;
  if (gdn->ctx_create(args, &ctx) != GDN_OK) fail_msg("gdn_ctx_create: %s", gdn->last_error());
  return ctx;
}

static gdn_ctx *make_threads(int n) {
  const gdn_ctx_args args = {.struct_size = sizeof args, .n_threads = n};
  return make_ctx(&args);
}

static void check_calls(gdn_ctx *ctx) {
  for (int call = 0; call < GUEST_N_CALLS; call++) {
    if (guest_run(gdn, ctx, &work, (enum guest_call)call) != GDN_OK) fail_msg("call %d: %s", call, gdn->last_error());
    assert_true(guest_digest(&work) == expected[call]);
  }
}

static gdn_info info_of(gdn_ctx *ctx) {
  gdn_info info = {.struct_size = sizeof info};
  assert_int_equal(gdn->ctx_info(ctx, &info), GDN_OK);
  return info;
}

static void nap_ms(long ms) {
  const struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
  nanosleep(&t, NULL);
}

static void own_cpus(cpu_set_t *cpus) {
  assert_int_equal(sched_getaffinity(0, sizeof *cpus, cpus), 0);
}

/* The n-th cpu that this process may use, -1 if there are fewer. */
static int nth_cpu(int n) {
  cpu_set_t cpus;
  own_cpus(&cpus);
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &cpus) && n-- == 0) return cpu;
  return -1;
}

static int n_cpus(void) {
  cpu_set_t cpus;
  own_cpus(&cpus);
  return CPU_COUNT(&cpus);
}

/* Where each worker may run. */
static cpu_set_t worker_cpus[MAX_WORKERS];

static void tell_cpus(void *arg, int32_t worker, int32_t n_workers) {
  (void)arg;
  (void)n_workers;
  if (worker < MAX_WORKERS) sched_getaffinity(0, sizeof worker_cpus[worker], &worker_cpus[worker]);
}

/* ---- threads: the caller's state ---- */

/* Tile registers are configured by the caller where there are any. */
struct tiles {
  int used;
  char config[64];
};

__attribute__((target("amx-tile"))) static void load_tiles(const void *config) {
  _tile_loadconfig(config);
}

__attribute__((target("amx-tile"))) static void store_tiles(void *config) {
  _tile_storeconfig(config);
}

static int have_tiles(void) {
  unsigned a, b, c, d;
  const long arch_req_xcomp_perm = 0x1023, xtile_data = 18;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1)) return 0;
  return syscall(SYS_arch_prctl, arch_req_xcomp_perm, xtile_data) == 0;
}

struct caller_state {
  cpu_set_t cpus;
  sigset_t signals;
  unsigned mxcsr;
  int error;
  int n_threads, dynamic, levels, in_parallel, bind;
  struct tiles tiles;
};

/* Compared as bytes, so everything is cleared first; errno and MXCSR are read before all else. */
static void read_state(struct caller_state *s, int with_tiles) {
  const int error = errno;
  const unsigned mxcsr = _mm_getcsr();
  memset(s, 0, sizeof *s);
  s->error = error;
  s->mxcsr = mxcsr;
  sched_getaffinity(0, sizeof s->cpus, &s->cpus);
  pthread_sigmask(SIG_SETMASK, NULL, &s->signals);
  s->n_threads = omp_get_max_threads();
  s->dynamic = omp_get_dynamic();
  s->levels = omp_get_max_active_levels();
  s->in_parallel = omp_in_parallel();
  s->bind = (int)omp_get_proc_bind();
  s->tiles.used = with_tiles;
  if (with_tiles) store_tiles(s->tiles.config);
  errno = error;
  _mm_setcsr(mxcsr);
}

static void same_state(const char *when, const struct caller_state *before, int with_tiles) {
  struct caller_state now;
  read_state(&now, with_tiles);
  if (!memcmp(&now, before, sizeof now)) return;
  fail_msg("after %s: errno %d -> %d, mxcsr %x -> %x, affinity %d, signals %d, OpenMP %d/%d/%d -> %d/%d/%d, tiles %d",
           when, before->error, now.error, before->mxcsr, now.mxcsr, memcmp(&now.cpus, &before->cpus, sizeof now.cpus),
           memcmp(&now.signals, &before->signals, sizeof now.signals), before->n_threads, before->dynamic,
           before->levels, now.n_threads, now.dynamic, now.levels,
           memcmp(&now.tiles, &before->tiles, sizeof now.tiles));
}

static void check_state_through_life(const gdn_ctx_args *args, int with_tiles) {
  static const char *const names[] = {"recurrent prefill", "chunk prefill", "decode", "paged prefill"};
  struct caller_state before;
  gdn_ctx *ctx = NULL, *none = NULL;
  gdn_info info = {.struct_size = sizeof info};
  const gdn_ctx_args bad = {.struct_size = sizeof bad, .place = GDN_PLACE_CPU_LIST, .cpu_list = "8000"};
  read_state(&before, with_tiles);
  gdn_status status = gdn->ctx_create(args, &ctx);
  same_state("create", &before, with_tiles);
  assert_int_equal(status, GDN_OK);
  for (int call = 0; call < GUEST_N_CALLS; call++) {
    status = guest_run(gdn, ctx, &work, (enum guest_call)call);
    same_state(names[call], &before, with_tiles);
    assert_int_equal(status, GDN_OK);
    assert_true(guest_digest(&work) == expected[call]);
  }
  assert_int_equal(gdn->ctx_info(ctx, &info), GDN_OK);
  same_state("info", &before, with_tiles);
  assert_int_equal(gdn->decode(ctx, NULL), GDN_E_NULL);
  same_state("a refused call", &before, with_tiles);
  assert_int_equal(gdn->ctx_create(&bad, &none), GDN_E_CPUS);
  same_state("a refused create", &before, with_tiles);
  assert_int_equal(gdn->ctx_run(ctx, tell_cpus, NULL), GDN_OK);
  same_state("run", &before, with_tiles);
  gdn->ctx_destroy(ctx);
  same_state("destroy", &before, with_tiles);
}

/* An unusual caller: other rounding, exceptions that trap when inexact, signals blocked, its own OpenMP settings. */
static void caller_finds_its_state_unchanged(void **state) {
  (void)state;
  const unsigned mxcsr = _mm_getcsr();
  const int n_threads = omp_get_max_threads(), with_tiles = have_tiles();
  sigset_t some, before;
  sigemptyset(&some);
  sigaddset(&some, SIGUSR1);
  sigaddset(&some, SIGALRM);
  pthread_sigmask(SIG_BLOCK, &some, &before);
  omp_set_num_threads(5);
  omp_set_dynamic(1);
  if (with_tiles) {
    const unsigned char config[64] = {[0] = 1, [16] = 64, [17] = 0, [48] = 16};
    load_tiles(config);
  } else {
    check_skip("tile state of the caller", "no AMX");
  }
  for (int n = 1; n <= 3; n++)
    for (int pin = GDN_PIN_ON; pin <= GDN_PIN_OFF; pin++) {
      const gdn_ctx_args args = {.struct_size = sizeof args, .n_threads = n, .pin = pin};
      errno = 77;
      _mm_setcsr(0xefe1u & ~0x1000u); /* flush to zero, toward minus infinity, inexact traps, invalid has happened */
      check_state_through_life(&args, with_tiles);
      _mm_setcsr(mxcsr);
    }
  omp_set_dynamic(0);
  omp_set_num_threads(n_threads);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void calls_from_inside_callers_region_are_correct(void **state) {
  (void)state;
  gdn_ctx *shared = make_threads(2);
  atomic_int n_wrong = 0, n_callers = 0, n_done = 0;
#pragma omp parallel num_threads(3)
  {
    struct guest_work *own = malloc(sizeof *own);
    gdn_ctx *ctx = NULL;
    const gdn_ctx_args args = {.struct_size = sizeof args, .n_threads = 2};
    const int thread = omp_get_thread_num(), size = omp_get_num_threads();
    atomic_fetch_add(&n_callers, 1);
    if (own) guest_fill(own);
    if (!own || gdn->ctx_create(&args, &ctx) != GDN_OK) atomic_fetch_add(&n_wrong, 1);
    for (int round = 0; round < 5 && own && ctx; round++)
      for (int call = 0; call < GUEST_N_CALLS; call++) {
        gdn_ctx *used = (round + thread) % 2 ? shared : ctx;
        if (guest_run(gdn, used, own, (enum guest_call)call) != GDN_OK || guest_digest(own) != expected[call])
          atomic_fetch_add(&n_wrong, 1);
      }
    gdn->ctx_destroy(ctx);
    free(own);
    if (omp_get_thread_num() != thread || omp_get_num_threads() != size) atomic_fetch_add(&n_wrong, 1);
    atomic_fetch_add(&n_done, 1);
  }
  while (atomic_load(&n_done) < 3) sched_yield(); /* for ThreadSanitizer, which does not see a region's end */
  gdn->ctx_destroy(shared);
  assert_int_equal(atomic_load(&n_callers), 3);
  assert_int_equal(atomic_load(&n_wrong), 0);
}

/* LLVM's runtime runs a region of its own first, through the entry that clang would call. */
static atomic_int n_llvm_threads;

static void llvm_region(int32_t *global_thread, int32_t *thread, ...) {
  (void)global_thread;
  (void)thread;
  atomic_fetch_add(&n_llvm_threads, 1);
}

static void caller_of_llvms_runtime_is_undisturbed(void **state) {
  (void)state;
  static struct {
    int32_t reserved_1, flags, reserved_2, reserved_3;
    const char *source;
  } location = {.flags = 2, .source = ";test_guest.c;region;1;1;;"};
  if (SANITIZED) skip(); /* the runtime's memory and synchronisation are not known to the sanitizers */
  void *runtime = dlopen("libomp.so.5", RTLD_NOW | RTLD_LOCAL);
  if (!runtime) {
    check_skip("LLVM's OpenMP runtime in the same process", "libomp.so.5 is not installed");
    return;
  }
  void (*fork_call)(void *, int32_t, void (*)(int32_t *, int32_t *, ...), ...);
  int (*max_threads)(void);
  void (*set_num_threads)(int);
  *(void **)&fork_call = dlsym(runtime, "__kmpc_fork_call");
  *(void **)&max_threads = dlsym(runtime, "omp_get_max_threads");
  *(void **)&set_num_threads = dlsym(runtime, "omp_set_num_threads");
  assert_true(fork_call && max_threads && set_num_threads);
  set_num_threads(3);
  fork_call(&location, 0, llvm_region);
  for (int n = 1; n <= 3; n++) {
    gdn_ctx *ctx = make_threads(n);
    check_calls(ctx);
    atomic_store(&n_llvm_threads, 0);
    fork_call(&location, 0, llvm_region);
    assert_int_equal(atomic_load(&n_llvm_threads), 3);
    check_calls(ctx);
    gdn->ctx_destroy(ctx);
    assert_int_equal(max_threads(), 3);
  }
  /* Stays loaded: the runtime does not survive being unloaded under its threads. */
}

/* ---- threads: many callers, many contexts ---- */

struct caller {
  gdn_ctx *ctx;
  int n_rounds, n_wrong;
};

static void *call_often(void *arg) {
  struct caller *caller = arg;
  struct guest_work *own = malloc(sizeof *own);
  if (!own) {
    caller->n_wrong++;
    return NULL;
  }
  guest_fill(own);
  for (int round = 0; round < caller->n_rounds; round++)
    for (int call = 0; call < GUEST_N_CALLS; call++)
      caller->n_wrong +=
          guest_run(gdn, caller->ctx, own, (enum guest_call)call) != GDN_OK || guest_digest(own) != expected[call];
  free(own);
  return NULL;
}

static int sizes(int which) {
  const int n[] = {1, 2, 3, 7, 2 * n_cpus()};
  return which < (int)(sizeof n / sizeof *n) ? n[which] : 0;
}

static void contexts_of_any_size_give_the_same_bits(void **state) {
  (void)state;
  for (int i = 0; sizes(i) > 0; i++)
    for (int pin = GDN_PIN_ON; pin <= GDN_PIN_OFF; pin++) {
      const gdn_ctx_args args = {.struct_size = sizeof args, .n_threads = sizes(i), .pin = pin};
      gdn_ctx *ctx = make_ctx(&args);
      assert_int_equal(info_of(ctx).n_threads, sizes(i));
      for (int round = 0; round < 5; round++) check_calls(ctx);
      gdn->ctx_destroy(ctx);
    }
}

static void calls_from_many_threads_are_serialised_and_correct(void **state) {
  (void)state;
  enum { N_CALLERS = 6 };
  for (int i = 0; sizes(i) > 0; i++) {
    pthread_t threads[N_CALLERS];
    struct caller callers[N_CALLERS];
    gdn_ctx *ctx = make_threads(sizes(i));
    for (int t = 0; t < N_CALLERS; t++) {
      callers[t] = (struct caller){ctx, 10, 0};
      assert_int_equal(pthread_create(&threads[t], NULL, call_often, &callers[t]), 0);
    }
    for (int t = 0; t < N_CALLERS; t++) {
      pthread_join(threads[t], NULL);
      assert_int_equal(callers[t].n_wrong, 0);
    }
    gdn->ctx_destroy(ctx);
  }
}

static void contexts_on_disjoint_cores_run_side_by_side(void **state) {
  (void)state;
  pthread_t threads[2];
  struct caller callers[2];
  if (nth_cpu(1) < 0) {
    check_skip("two contexts on disjoint cores", "one cpu only");
    return;
  }
  for (int i = 0; i < 2; i++) {
    char list[16];
    snprintf(list, sizeof list, "%d", nth_cpu(i));
    const gdn_ctx_args args = {.struct_size = sizeof args, .place = GDN_PLACE_CPU_LIST, .cpu_list = list};
    callers[i] = (struct caller){make_ctx(&args), 20, 0};
    assert_int_equal(info_of(callers[i].ctx).n_threads, 1);
    assert_int_equal(info_of(callers[i].ctx).pinned, 1);
    assert_string_equal(info_of(callers[i].ctx).placement, list);
    assert_int_equal(gdn->ctx_run(callers[i].ctx, tell_cpus, NULL), GDN_OK);
    assert_int_equal(CPU_COUNT(&worker_cpus[0]), 1);
    assert_true(CPU_ISSET(nth_cpu(i), &worker_cpus[0]));
  }
  for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&threads[i], NULL, call_often, &callers[i]), 0);
  for (int i = 0; i < 2; i++) {
    pthread_join(threads[i], NULL);
    assert_int_equal(callers[i].n_wrong, 0);
    gdn->ctx_destroy(callers[i].ctx);
  }
}

/* ---- placement ---- */

static void refused(gdn_ctx_args args, gdn_status want, const char *text) {
  gdn_ctx *ctx = NULL;
  args.struct_size = sizeof args;
  const gdn_status status = gdn->ctx_create(&args, &ctx);
  if (status != want || !strstr(gdn->last_error(), text) || ctx)
    fail_msg("%s \"%s\", expected %s with \"%s\"", gdn->status_name(status), gdn->last_error(), gdn->status_name(want),
             text);
}

#define LIST(text)                                                                                                     \
  (gdn_ctx_args) {                                                                                                     \
    .place = GDN_PLACE_CPU_LIST, .cpu_list = text                                                                      \
  }

static void impossible_places_are_named(void **state) {
  (void)state;
  refused(LIST(""), GDN_E_CPUS, "names no cpu");
  refused(LIST("0-"), GDN_E_CPUS, "found \"0-\"");
  refused(LIST("0,,1"), GDN_E_CPUS, "found \",1\"");
  refused(LIST("zero"), GDN_E_CPUS, "found \"zero\"");
  refused(LIST("0, 1"), GDN_E_CPUS, "found \" 1\"");
  refused(LIST("3-1"), GDN_E_CPUS, "runs backwards");
  refused(LIST("99999999999"), GDN_E_CPUS, "beyond the largest");
  refused(LIST("8191"), GDN_E_CPUS, "cpu 8191 is not there");
  refused(LIST("0-8191"), GDN_E_CPUS, "is not there");
  refused(LIST(NULL), GDN_E_NULL, "cpu_list is null");
  refused((gdn_ctx_args){.cpu_list = "0"}, GDN_E_OPTION, "needs place");
  refused((gdn_ctx_args){.numa_node = 1}, GDN_E_OPTION, "needs place");
  refused((gdn_ctx_args){.place = 3}, GDN_E_OPTION, "place = 3");
  refused((gdn_ctx_args){.place = GDN_PLACE_NUMA_NODE, .numa_node = 4000}, GDN_E_CPUS, "no such node");
  refused((gdn_ctx_args){.place = GDN_PLACE_NUMA_NODE, .numa_node = -1}, GDN_E_CPUS, "numa_node = -1");
}

static void default_place_is_the_affinity_mask(void **state) {
  (void)state;
  cpu_set_t before, one;
  own_cpus(&before);
  CPU_ZERO(&one);
  const int last = nth_cpu(n_cpus() - 1);
  CPU_SET(last, &one);
  sched_setaffinity(0, sizeof one, &one);
  gdn_ctx *ctx = make_ctx(NULL);
  char list[16];
  snprintf(list, sizeof list, "%d", last);
  assert_int_equal(info_of(ctx).n_threads, 1);
  assert_string_equal(info_of(ctx).placement, list);
  check_calls(ctx);
  gdn->ctx_destroy(ctx);
  /* A list is not bounded by the mask of the thread that happens to call. */
  snprintf(list, sizeof list, "%d", nth_cpu(0));
  sched_setaffinity(0, sizeof before, &before);
  snprintf(list, sizeof list, "%d", nth_cpu(0));
  sched_setaffinity(0, sizeof one, &one);
  gdn_ctx_args args = LIST(list);
  args.struct_size = sizeof args;
  ctx = make_ctx(&args);
  assert_string_equal(info_of(ctx).placement, list);
  gdn->ctx_destroy(ctx);
  sched_setaffinity(0, sizeof before, &before);
}

static void numa_node_bounds_the_place(void **state) {
  (void)state;
  const gdn_ctx_args args = {.struct_size = sizeof args, .place = GDN_PLACE_NUMA_NODE};
  gdn_ctx *ctx = NULL;
  const gdn_status status = gdn->ctx_create(&args, &ctx);
  if (status != GDN_OK) { /* the mask may lie on other nodes, or /sys be hidden */
    assert_int_equal(status, GDN_E_CPUS);
    check_skip("workers on NUMA node 0", gdn->last_error());
    return;
  }
  assert_in_range(info_of(ctx).n_threads, 1, n_cpus());
  check_calls(ctx);
  gdn->ctx_destroy(ctx);
}

static void unpinned_workers_stay_in_their_place(void **state) {
  (void)state;
  char list[16];
  cpu_set_t cpus;
  own_cpus(&cpus);
  snprintf(list, sizeof list, "%d", nth_cpu(0));
  gdn_ctx_args args = {.struct_size = sizeof args, .n_threads = 2, .pin = GDN_PIN_OFF};
  gdn_ctx *ctx = make_ctx(&args);
  assert_int_equal(info_of(ctx).pinned, 0);
  assert_non_null(strstr(info_of(ctx).placement, "not bound: pin = GDN_PIN_OFF"));
  gdn->ctx_run(ctx, tell_cpus, NULL);
  for (int i = 0; i < 2; i++) assert_true(CPU_EQUAL(&worker_cpus[i], &cpus));
  gdn->ctx_destroy(ctx);
  args.place = GDN_PLACE_CPU_LIST;
  args.cpu_list = list;
  ctx = make_ctx(&args);
  gdn->ctx_run(ctx, tell_cpus, NULL);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(CPU_COUNT(&worker_cpus[i]), 1);
    assert_true(CPU_ISSET(nth_cpu(0), &worker_cpus[i]));
  }
  check_calls(ctx);
  gdn->ctx_destroy(ctx);
}

/* ---- placement: a system that refuses; each in a process of its own ---- */

static int run_role(const char *role, const char *name, const char *value) {
  const pid_t child = fork();
  if (child == 0) {
    if (name) setenv(name, value, 1);
    execl("/proc/self/exe", "test_guest", role, (char *)NULL);
    _exit(99);
  }
  int status = 0;
  assert_int_equal(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void check_role(const char *role, const char *name, const char *value, const char *what) {
  const int code = run_role(role, name, value);
  if (code == EXIT_SKIP)
    check_skip(what, "the system does not let the test try it");
  else
    assert_int_equal(code, 0);
}

/* Creates by default, wants text in what info says, and correct calls. */
static int main_with_placement(const char *text, int pinned, int n_threads) {
  gdn_ctx *ctx = NULL;
  gdn_info info = {.struct_size = sizeof info};
  if (gdn->ctx_create(NULL, &ctx) != GDN_OK || gdn->ctx_info(ctx, &info) != GDN_OK) {
    fprintf(stderr, "%s\n", gdn->last_error());
    return 2;
  }
  if (!strstr(info.placement, text) || info.pinned != pinned || (n_threads > 0 && info.n_threads != n_threads)) {
    fprintf(stderr, "pinned %d, %d threads, placement %s\n", info.pinned, info.n_threads, info.placement);
    return 3;
  }
  for (int call = 0; call < GUEST_N_CALLS; call++)
    if (guest_run(gdn, ctx, &work, (enum guest_call)call) != GDN_OK || guest_digest(&work) != expected[call]) return 4;
  gdn->ctx_destroy(ctx);
  return 0;
}

static int refuse_call(unsigned number) {
  struct sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const struct sock_fprog filter = {.len = sizeof program / sizeof *program, .filter = program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

static int main_without_binding(void) {
  if (!refuse_call(SYS_sched_setaffinity)) return EXIT_SKIP;
  const int status = main_with_placement("workers bound: Operation not permitted", 0, 0);
  if (status != 0) return status;
  const gdn_ctx_args args = {.struct_size = sizeof args, .place = GDN_PLACE_CPU_LIST, .cpu_list = "0"};
  gdn_ctx *ctx = NULL;
  if (gdn->ctx_create(&args, &ctx) != GDN_OK) return 5;
  gdn->ctx_destroy(ctx);
  return 0;
}

static int main_without_affinity(void) {
  if (!refuse_call(SYS_sched_getaffinity)) return EXIT_SKIP;
  return main_with_placement("affinity mask hidden", 0, 1);
}

/* The machine's cpus as hwloc would see them on another: "smt" as pairs of one core, "nodes" as two NUMA nodes. */
static int main_with_synthetic_topology(int smt) {
  const int n = n_cpus();
  char all[64];
  gdn_ctx_args args = {.struct_size = sizeof args};
  gdn_ctx *ctx = NULL;
  snprintf(all, sizeof all, "0-%d", n - 1);
  if (smt) { /* a worker on the first unit of every core, then on the second ones */
    if (main_with_placement(n == 2 ? "0" : "0,2", 1, n / 2) != 0) return 11;
    args.n_threads = n;
    if (gdn->ctx_create(&args, &ctx) != GDN_OK || strcmp(info_of(ctx).placement, all) != 0) return 12;
    gdn->ctx_run(ctx, tell_cpus, NULL);
    for (int i = 0; i < n && i < MAX_WORKERS; i++)
      if (CPU_COUNT(&worker_cpus[i]) != 1 || !CPU_ISSET(2 * i % n + 2 * i / n, &worker_cpus[i])) return 13;
    gdn->ctx_destroy(ctx);
    return 0;
  }
  args.place = GDN_PLACE_NUMA_NODE;
  for (args.numa_node = 0; args.numa_node < 2; args.numa_node++) {
    if (gdn->ctx_create(&args, &ctx) != GDN_OK || info_of(ctx).n_threads != n / 2) return 14;
    gdn->ctx_run(ctx, tell_cpus, NULL);
    for (int i = 0; i < n / 2 && i < MAX_WORKERS; i++)
      if (CPU_COUNT(&worker_cpus[i]) != 1 || !CPU_ISSET(args.numa_node * n / 2 + i, &worker_cpus[i])) return 15;
    gdn->ctx_destroy(ctx);
  }
  return gdn->ctx_create(&args, &ctx) == GDN_E_CPUS ? 0 : 16;
}

/* A file of text in the place of path, for this process only. */
static int replace_file(const char *path, const char *text) {
  char name[] = "/tmp/gdn_guest_XXXXXX";
  const int fd = mkstemp(name);
  if (fd < 0) return 0;
  const int written = write(fd, text, strlen(text)) == (ssize_t)strlen(text) && mount(name, path, "", MS_BIND, "") == 0;
  close(fd);
  unlink(name);
  return written;
}

/* A quota of half a core, as the kernel would tell it. */
static int main_under_quota(void) {
  char root[] = "/tmp/gdn_quota_XXXXXX", path[64], mounts[128];
  if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return EXIT_SKIP;
  if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 || !mkdtemp(root)) return EXIT_SKIP;
  snprintf(path, sizeof path, "%s/cpu.max", root);
  snprintf(mounts, sizeof mounts, "31 23 0:26 / %s rw - cgroup2 cgroup2 rw\n", root);
  FILE *file = fopen(path, "w");
  int status = EXIT_SKIP;
  if (file) {
    fputs("50000 100000\n", file);
    fclose(file);
    if (replace_file("/proc/self/cgroup", "0::/\n") && replace_file("/proc/self/mountinfo", mounts))
      status = main_with_placement("", 1, 1);
  }
  unlink(path);
  rmdir(root);
  return status;
}

static int main_without_sys(void) {
  if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return EXIT_SKIP;
  if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 || mount("none", "/sys", "tmpfs", 0, NULL) != 0)
    return EXIT_SKIP;
  return main_with_placement("every cpu counts as a core", 1, n_cpus());
}

static void refused_binding_runs_unbound_and_says_so(void **state) {
  (void)state;
  if (SANITIZED || dlsym(RTLD_DEFAULT, "kmp_get_blocktime")) skip(); /* these runtimes end the process themselves */
  check_role("no-binding", NULL, NULL, "sched_setaffinity refused");
  check_role("no-affinity", NULL, NULL, "sched_getaffinity refused");
}

/* Programs that the host starts inherit its environment and its descriptors. */
static void environment_and_descriptors_are_unchanged(void **state) {
  (void)state;
  const int code = run_role("environment", NULL, NULL);
  assert_int_equal(code, 0);
}

static int main_watching_environment(char **entries) {
  static char *before[4096];
  int n = 0;
  for (; entries[n] && n < 4095; n++) before[n] = entries[n];
  const int n_files = guest_n_files();
  if (setup()) return 2;
  gdn_ctx *ctx = make_ctx(NULL);
  info_of(ctx);
  gdn->ctx_destroy(ctx);
  for (int i = 0; i <= n; i++)
    if (environ[i] != before[i]) {
      fprintf(stderr, "environment: %s\n", environ[i] ? environ[i] : "an entry is gone");
      return 3;
    }
  return guest_n_files() == n_files ? 0 : 4;
}

static void hidden_topology_counts_cpus_as_cores(void **state) {
  (void)state;
  check_role("no-sys", NULL, NULL, "/sys hidden");
  check_role("foreign-topology", "HWLOC_SYNTHETIC", "core:64 pu:2", "topology of another machine");
}

static void cores_and_nodes_of_another_machine_are_used_as_such(void **state) {
  (void)state;
  char synthetic[64];
  const int n = n_cpus();
  if (n % 2 != 0 || nth_cpu(n - 1) != n - 1) {
    check_skip("workers by core and by NUMA node", "the cpus are not 0 .. n - 1, n even");
    return;
  }
  setenv("HWLOC_THISSYSTEM", "1", 1);
  snprintf(synthetic, sizeof synthetic, "core:%d pu:2", n / 2);
  check_role("smt", "HWLOC_SYNTHETIC", synthetic, "two units a core");
  snprintf(synthetic, sizeof synthetic, "pack:2 [numa] core:%d pu:1", n / 2);
  check_role("nodes", "HWLOC_SYNTHETIC", synthetic, "two NUMA nodes");
  unsetenv("HWLOC_THISSYSTEM");
}

static void cpu_quota_bounds_the_workers(void **state) {
  (void)state;
  check_role("quota", NULL, NULL, "a cgroup's cpu quota");
}

/* ---- latency and idleness ---- */

static int64_t process_cpu_us(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return (int64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 + usage.ru_utime.tv_usec +
         usage.ru_stime.tv_usec;
}

static void idle_context_uses_no_cpu(void **state) {
  (void)state;
  for (int i = 0; sizes(i) > 0; i++) {
    nap_ms(300); /* LLVM's runtime, if it is there, keeps the threads of earlier contexts spinning for 200 ms */
    gdn_ctx *ctx = make_threads(sizes(i));
    check_calls(ctx);
    nap_ms(20);
    const int64_t before_us = process_cpu_us();
    nap_ms(300);
    const int64_t used_us = process_cpu_us() - before_us;
    print_message("%d workers idle for 300 ms: %lld us of processor time\n", sizes(i), (long long)used_us);
    assert_in_range(used_us, 0, SANITIZED ? 30000 : 1000); /* sanitizers have a thread of their own */
    gdn->ctx_destroy(ctx);
  }
}

/* Sleeps of each worker; giving way without sleeping does not count. */
static long n_sleeps[MAX_WORKERS];

static void tell_sleeps(void *arg, int32_t worker, int32_t n_workers) {
  struct rusage usage;
  (void)arg;
  (void)n_workers;
  getrusage(RUSAGE_THREAD, &usage);
  if (worker < MAX_WORKERS) n_sleeps[worker] = usage.ru_nvcsw;
}

static long count_sleeps(gdn_ctx *ctx, int n) {
  long total = 0;
  gdn->ctx_run(ctx, tell_sleeps, NULL);
  for (int i = 0; i < n; i++) total += n_sleeps[i];
  return total;
}

/* A model's 48 layers decode one after the other. Other load may put a worker to sleep, so the best of several rounds
 * counts. */
static void back_to_back_calls_wake_nobody(void **state) {
  (void)state;
  if (SANITIZED) skip(); /* calls take longer there than workers wait */
  for (int n = 1; n <= n_cpus() && n <= 4; n++) {
    gdn_ctx *ctx = make_threads(n);
    long least = 1000;
    for (int round = 0; round < 50 && least > 0; round++) {
      long before = count_sleeps(ctx, n);
      for (int layer = 0; layer < 48; layer++) guest_run(gdn, ctx, &work, GUEST_DECODE);
      const long slept = count_sleeps(ctx, n) - before;
      if (slept < least) least = slept;
    }
    print_message("%d workers, 48 calls: slept %ld times\n", n, least);
    assert_in_range(least, 0, 2);
    gdn->ctx_destroy(ctx);
  }
}

/* ---- the whole ---- */

static int setup(void) {
  gdn = gdn_get_interface(GDN_INTERFACE_VERSION);
  if (!gdn) return 1;
  guest_fill(&work);
  const gdn_ctx_args args = {.struct_size = sizeof args, .n_threads = 1, .pin = GDN_PIN_OFF};
  gdn_ctx *ctx = NULL;
  if (gdn->ctx_create(&args, &ctx) != GDN_OK) return 1;
  for (int call = 0; call < GUEST_N_CALLS; call++) {
    if (guest_run(gdn, ctx, &work, (enum guest_call)call) != GDN_OK) {
      fprintf(stderr, "%s\n", gdn->last_error());
      return 1;
    }
    expected[call] = guest_digest(&work);
  }
  gdn->ctx_destroy(ctx);
  return 0;
}

static int run_as(const char *role) {
  if (!strcmp(role, "no-binding")) return main_without_binding();
  if (!strcmp(role, "no-affinity")) return main_without_affinity();
  if (!strcmp(role, "no-sys")) return main_without_sys();
  if (!strcmp(role, "smt") || !strcmp(role, "nodes")) return main_with_synthetic_topology(!strcmp(role, "smt"));
  if (!strcmp(role, "quota")) return main_under_quota();
  if (!strcmp(role, "foreign-topology")) return main_with_placement("every cpu counts as a core", 1, n_cpus());
  return 98;
}

int main(int argc, char **argv) {
  if (access("/proc/self/exe", X_OK) != 0) return 77;                       /* nothing to look at, nothing to run */
  if (argc == 1 && access("/sys/devices/system/cpu", X_OK) != 0) return 77; /* no topology to place workers by */
  if (argc > 1 && !strcmp(argv[1], "environment")) return main_watching_environment(environ);
  if (setup()) return 97;
  if (argc > 1) return run_as(argv[1]);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(caller_finds_its_state_unchanged),
      cmocka_unit_test(calls_from_inside_callers_region_are_correct),
      cmocka_unit_test(contexts_of_any_size_give_the_same_bits),
      cmocka_unit_test(calls_from_many_threads_are_serialised_and_correct),
      cmocka_unit_test(contexts_on_disjoint_cores_run_side_by_side),
      cmocka_unit_test(impossible_places_are_named),
      cmocka_unit_test(default_place_is_the_affinity_mask),
      cmocka_unit_test(numa_node_bounds_the_place),
      cmocka_unit_test(unpinned_workers_stay_in_their_place),
      cmocka_unit_test(refused_binding_runs_unbound_and_says_so),
      cmocka_unit_test(hidden_topology_counts_cpus_as_cores),
      cmocka_unit_test(cores_and_nodes_of_another_machine_are_used_as_such),
      cmocka_unit_test(cpu_quota_bounds_the_workers),
      cmocka_unit_test(environment_and_descriptors_are_unchanged),
      cmocka_unit_test(idle_context_uses_no_cpu),
      cmocka_unit_test(back_to_back_calls_wake_nobody),
      cmocka_unit_test(caller_of_llvms_runtime_is_undisturbed),
  };
  return check_summary("guest", cmocka_run_group_tests_name("guest", tests, NULL, NULL));
}
