/* SPDX-License-Identifier: Apache-2.0
 * Layer 0: processor, cores, memory and the team of workers, and that none of them leaves a trace in the process. */
#define _GNU_SOURCE 1
#include "platform.h"

#include <dirent.h>
#include <errno.h>
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
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <cmocka.h>

#include "gdn.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

enum { MAX_WORKERS = 256, N_PHASES = 200 };

static int n_cpus(void) {
  cpu_set_t mask;
  assert_int_equal(sched_getaffinity(0, sizeof mask, &mask), 0);
  return CPU_COUNT(&mask);
}

static struct gdn_topo *make_topo(void) {
  char reason[160];
  struct gdn_topo *topo = gdn_topo_create(NULL, GDN_ANY_NODE, reason, sizeof reason);
  assert_string_equal(reason, "");
  assert_non_null(topo);
  return topo;
}

/* Calls check with teams of 1, 2, 3, 7 workers and twice the cpus, bound and not. */
static void with_teams(void (*check)(struct gdn_team *team, int n)) {
  const int sizes[] = {1, 2, 3, 7, 2 * n_cpus()};
  struct gdn_topo *topo = make_topo();
  assert_non_null(topo);
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    for (int bound = 0; bound < 2; bound++) {
      const int n = sizes[i] < MAX_WORKERS ? sizes[i] : MAX_WORKERS;
      struct gdn_team *team;
      assert_int_equal(gdn_team_create(&team, n, topo, bound), 0);
      assert_int_equal(gdn_team_size(team), n);
      check(team, n);
      gdn_team_destroy(team);
    }
  }
  gdn_topo_destroy(topo);
}

static int count_entries(const char *dir_name) {
  DIR *dir = opendir(dir_name);
  assert_non_null(dir);
  int n = 0;
  for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) n += entry->d_name[0] != '.';
  closedir(dir);
  return n;
}

/* The n-th cpu that this thread may use. */
static int nth_cpu(int n) {
  cpu_set_t mask;
  sched_getaffinity(0, sizeof mask, &mask);
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &mask) && n-- == 0) return cpu;
  return -1;
}

static void bind_to(int cpu) {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  CPU_SET(cpu, &mask);
  sched_setaffinity(0, sizeof mask, &mask);
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void nap_us(long us) {
  const struct timespec t = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
  nanosleep(&t, NULL);
}

/* ---- cpu ---- */

static void cpu_detect_gives_name_and_no_reason_for_own_flags(void **state) {
  (void)state;
  struct gdn_cpu cpu;
  char text[96];
  gdn_cpu_detect(&cpu);
  assert_true(strlen(cpu.name) > 0);
  assert_string_equal(gdn_cpu_missing(&cpu, cpu.flags, text, sizeof text), "");
  print_message("%s, flags %x, xcr0 %llx\n", cpu.name, (unsigned)cpu.flags, (unsigned long long)cpu.xcr0);
  const uint32_t all = GDN_CPU_AVX2 | GDN_CPU_AVX512 | GDN_CPU_AVX512BF16 | GDN_CPU_AMX;
  for (uint32_t flag = 1; flag <= all; flag *= 2) {
    gdn_cpu_missing(&cpu, flag, text, sizeof text);
    assert_int_equal(*text == '\0', (cpu.flags & flag) != 0);
  }
  assert_int_equal(!!(cpu.flags & GDN_CPU_AVX2), !!__builtin_cpu_supports("avx2"));
}

/* The largest cache that the kernel lists for cpu 0, in bytes; 0 where it lists none. */
static int64_t listed_cache(void) {
  int64_t most = 0;
  for (int i = 0; i < 16; i++) {
    char path[80];
    long kib = 0;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", i);
    FILE *f = fopen(path, "r");
    if (!f) continue;
    if (fscanf(f, "%ldK", &kib) == 1 && kib * 1024 > most) most = kib * 1024;
    fclose(f);
  }
  return most;
}

static void cpu_detect_finds_the_largest_cache(void **state) {
  (void)state;
  struct gdn_cpu cpu;
  gdn_cpu_detect(&cpu);
  if (listed_cache() == 0) skip();
  assert_int_equal(cpu.cache_bytes, listed_cache());
}

static void cpu_missing_names_the_lowest_reason(void **state) {
  (void)state;
  struct gdn_cpu cpu = {.features = ~0u, .xcr0 = ~0ull};
  char text[96];
  const uint32_t bf16 = GDN_CPU_AVX512BF16;
  assert_string_equal(gdn_cpu_missing(&cpu, bf16, text, sizeof text), "");
  cpu.xcr0 = 0x07; /* x87, xmm, ymm */
  assert_string_equal(gdn_cpu_missing(&cpu, GDN_CPU_AVX2, text, sizeof text), "");
  gdn_cpu_missing(&cpu, bf16, text, sizeof text);
  assert_string_equal(text, "operating system does not save zmm registers");
  cpu.xcr0 = 0;
  gdn_cpu_missing(&cpu, bf16, text, sizeof text);
  assert_string_equal(text, "operating system does not save ymm registers");
  cpu.features = 0;
  gdn_cpu_missing(&cpu, bf16, text, sizeof text);
  assert_string_equal(text, "processor lacks avx");
  cpu.features = 0x1f; /* the rows of AVX2, and avx512f */
  gdn_cpu_missing(&cpu, GDN_CPU_AVX512, text, sizeof text);
  assert_string_equal(text, "processor lacks avx512bw");
}

static void cpu_missing_says_why_there_are_no_tiles(void **state) {
  (void)state;
  struct gdn_cpu cpu = {.features = ~0u, .xcr0 = ~0ull};
  char text[96];
  assert_string_equal(gdn_cpu_missing(&cpu, GDN_CPU_AMX, text, sizeof text), "");
  cpu.tile_errno = EPERM;
  gdn_cpu_missing(&cpu, GDN_CPU_AMX, text, sizeof text);
  assert_string_equal(text, "kernel refused permission for tile data");
  assert_string_equal(gdn_cpu_missing(&cpu, GDN_CPU_AVX512BF16, text, sizeof text), "");
  cpu.tile_errno = ENODEV;
  gdn_cpu_missing(&cpu, GDN_CPU_AMX, text, sizeof text);
  assert_string_equal(text, "processor has tiles of another size");
  cpu.xcr0 = 0xe7;
  gdn_cpu_missing(&cpu, GDN_CPU_AMX, text, sizeof text);
  assert_string_equal(text, "operating system does not save tile registers");
}

/* From here on the kernel answers every request for permission with EPERM. */
static int refuse_permission(void) {
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_arch_prctl, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog filter = {sizeof code / sizeof code[0], code};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
}

enum { REFUSED_OK, REFUSED_SKIP, REFUSED_WRONG };

/* In a process of its own: the filter stays. */
static int run_refused(uint32_t flags_before) {
  gdn_ctx_args args = {.struct_size = sizeof args, .n_threads = 1};
  gdn_info info = {.struct_size = sizeof info};
  gdn_ctx *ctx = NULL;
  if (refuse_permission()) return REFUSED_SKIP;
  if (gdn_ctx_create(&args, &ctx) || gdn_ctx_info(ctx, &info)) return REFUSED_WRONG;
  const gdn_tier_info *top = &info.tiers[info.n_tiers - 1];
  int right = !top->available && strcmp(info.isa, "amx") != 0;
  if (flags_before & GDN_CPU_AMX)
    right = right && !strcmp(info.isa, "avx512bf16") && !strcmp(top->reason, "kernel refused permission for tile data");
  gdn_ctx_destroy(ctx);
  return right ? REFUSED_OK : REFUSED_WRONG;
}

static void cpu_without_permission_takes_the_next_tier(void **state) {
  (void)state;
  struct gdn_cpu cpu;
  int status;
  gdn_cpu_detect(&cpu);
  if (getenv("GDN_ISA") != NULL) skip();
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) _exit(run_refused(cpu.flags));
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  if (WEXITSTATUS(status) == REFUSED_SKIP) skip();
  assert_int_equal(WEXITSTATUS(status), REFUSED_OK);
}

/* ---- topo ---- */

static void topo_lists_allowed_cores_and_leaves_no_trace(void **state) {
  (void)state;
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof before, &before);
  const int n_files = count_entries("/proc/self/fd");
  errno = 77;
  struct gdn_topo *topo = make_topo();
  assert_int_equal(errno, 77);
  assert_non_null(topo);
  assert_int_equal(count_entries("/proc/self/fd"), n_files);
  sched_getaffinity(0, sizeof after, &after);
  assert_true(CPU_EQUAL(&before, &after));
  const int n = gdn_topo_n_cores(topo);
  assert_in_range(n, 1, CPU_COUNT(&before));
  assert_in_range(gdn_topo_n_workers(topo), 1, n);
  char text[256], cut[6];
  gdn_topo_describe(topo, gdn_topo_n_units(topo), text, sizeof text);
  print_message("%d cores: %s, workers %d, note \"%s\"\n", n, text, gdn_topo_n_workers(topo), gdn_topo_note(topo));
  gdn_topo_describe(topo, 1, cut, sizeof cut);
  assert_true(strlen(cut) < sizeof cut);
  gdn_topo_destroy(topo);
}

static void topo_with_one_allowed_cpu_lists_that_one(void **state) {
  (void)state;
  cpu_set_t before, one, now;
  sched_getaffinity(0, sizeof before, &before);
  int last = CPU_SETSIZE - 1;
  while (!CPU_ISSET(last, &before)) last--;
  CPU_ZERO(&one);
  CPU_SET(last, &one);
  assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
  struct gdn_topo *topo = make_topo();
  sched_setaffinity(0, sizeof before, &before);
  assert_non_null(topo);
  char text[32], expected[32];
  gdn_topo_describe(topo, gdn_topo_n_units(topo), text, sizeof text);
  snprintf(expected, sizeof expected, "%d", last);
  assert_string_equal(text, expected);
  assert_int_equal(gdn_topo_bind_self(topo, 5), 0);
  sched_getaffinity(0, sizeof now, &now);
  assert_true(CPU_EQUAL(&now, &one));
  sched_setaffinity(0, sizeof before, &before);
  gdn_topo_destroy(topo);
}

/* Writes root/path, making the directories on the way. */
static void write_below(const char *root, const char *path, const char *text) {
  char full[512];
  snprintf(full, sizeof full, "%s%s", root, path);
  for (char *slash = full + strlen(root) + 1; (slash = strchr(slash, '/')) != NULL; *slash++ = '/') {
    *slash = '\0';
    mkdir(full, 0700);
  }
  FILE *file = fopen(full, "w");
  assert_non_null(file);
  fputs(text, file);
  fclose(file);
}

static void remove_tree(const char *root) {
  char command[128];
  snprintf(command, sizeof command, "rm -r '%s'", root);
  assert_int_equal(system(command), 0);
}

#define V1_MOUNT "30 29 0:27 %s /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
#define V2_MOUNT "31 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"

/* Trees as the kernel shows them; the machine's own cgroups play no part. */
static void quota_is_the_smallest_on_the_way_up(void **state) {
  (void)state;
  char root[] = "/tmp/gdn_quota_XXXXXX", mounts[256];
  assert_non_null(mkdtemp(root));
  assert_int_equal(gdn_topo_quota(root), 0);
  write_below(root, "/proc/self/mountinfo", V2_MOUNT);
  write_below(root, "/proc/self/cgroup", "0::/pods/one/two\n");
  assert_int_equal(gdn_topo_quota(root), 0);
  write_below(root, "/sys/fs/cgroup/pods/one/two/cpu.max", "max 100000\n");
  assert_int_equal(gdn_topo_quota(root), 0);
  write_below(root, "/sys/fs/cgroup/pods/one/cpu.max", "250000 100000\n");
  assert_int_equal(gdn_topo_quota(root), 3);
  write_below(root, "/sys/fs/cgroup/pods/cpu.max", "50000 100000\n");
  assert_int_equal(gdn_topo_quota(root), 1);
  /* Version 1 beside it, as a container sees it: its own directory alone is mounted. */
  snprintf(mounts, sizeof mounts, V1_MOUNT, "/docker/0123");
  write_below(root, "/proc/self/mountinfo", mounts);
  write_below(root, "/proc/self/cgroup", "5:memory:/docker/0123\n4:cpu,cpuacct:/docker/0123\n0::/\n");
  assert_int_equal(gdn_topo_quota(root), 0);
  write_below(root, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  write_below(root, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  assert_int_equal(gdn_topo_quota(root), 0);
  write_below(root, "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "400000\n");
  assert_int_equal(gdn_topo_quota(root), 4);
  /* Outside a container: the whole tree is mounted. */
  snprintf(mounts, sizeof mounts, V1_MOUNT, "/");
  write_below(root, "/proc/self/mountinfo", mounts);
  write_below(root, "/sys/fs/cgroup/cpu,cpuacct/docker/0123/cpu.cfs_period_us", "50000\n");
  write_below(root, "/sys/fs/cgroup/cpu,cpuacct/docker/0123/cpu.cfs_quota_us", "100000\n");
  assert_int_equal(gdn_topo_quota(root), 2);
  remove_tree(root);
}

static void topo_of_a_list_holds_each_cpu_once(void **state) {
  (void)state;
  cpu_set_t mask, now;
  char all[1024], reason[160], text[1024];
  struct gdn_topo *own = make_topo();
  sched_getaffinity(0, sizeof mask, &mask);
  gdn_topo_describe(own, gdn_topo_n_units(own), all, sizeof all);
  assert_int_equal(gdn_topo_n_units(own), CPU_COUNT(&mask));
  struct gdn_topo *topo = gdn_topo_create(all, GDN_ANY_NODE, reason, sizeof reason);
  assert_string_equal(reason, "");
  assert_int_equal(gdn_topo_n_cores(topo), gdn_topo_n_cores(own));
  gdn_topo_describe(topo, gdn_topo_n_units(topo), text, sizeof text);
  assert_string_equal(text, all);
  assert_int_equal(gdn_topo_bind_self(topo, 0), 0);
  assert_int_equal(gdn_topo_limit_self(topo), 0);
  sched_getaffinity(0, sizeof now, &now);
  assert_true(CPU_EQUAL(&now, &mask));
  gdn_topo_destroy(topo);
  gdn_topo_destroy(own);
  assert_null(gdn_topo_create("8000", GDN_ANY_NODE, reason, sizeof reason));
  assert_string_equal(reason, "cpu 8000 is not there, or not this process's to use");
}

/* ---- mem ---- */

static void mem_blocks_are_aligned_and_writable(void **state) {
  (void)state;
  const size_t huge = (size_t)2 << 20;
  const size_t sizes[] = {0, 1, 63, 64, 65, 4096, huge - 1, huge, huge + 1, 3 * huge + 4097};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    char *block = gdn_mem_alloc(sizes[i]);
    assert_non_null(block);
    assert_int_equal((uintptr_t)block % (sizes[i] >= huge ? huge : GDN_ALIGN_BYTES), 0);
    memset(block, 1, sizes[i]);
    gdn_mem_free(block);
  }
  gdn_mem_free(NULL);
}

static void mem_large_block_is_untouched(void **state) {
  (void)state;
  enum { N_PAGES = 2048 };
  const size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
  static unsigned char resident[N_PAGES];
  char *block = gdn_mem_alloc(N_PAGES * page_bytes);
  assert_non_null(block);
  assert_int_equal(mincore(block, N_PAGES * page_bytes, resident), 0);
  for (int i = 0; i < N_PAGES; i++) assert_int_equal(resident[i] & 1, 0);
  gdn_mem_free(block);
}

static void mem_impossible_size_gives_null_and_keeps_errno(void **state) {
  (void)state;
  struct gdn_scratch scratch = {0};
  errno = 77;
  assert_null(gdn_mem_alloc(SIZE_MAX));
  assert_null(gdn_mem_alloc(SIZE_MAX / 2));
  assert_int_equal(gdn_scratch_reserve(&scratch, SIZE_MAX / 2), ENOMEM);
  assert_int_equal(errno, 77);
  assert_null(scratch.block);
  assert_int_equal(scratch.bytes, 0);
}

static void scratch_is_untouched_whatever_its_size(void **state) {
  (void)state;
  const size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
  unsigned char resident[16];
  struct gdn_scratch scratch = {0};
  for (int round = 0; round < 3; round++) {
    assert_int_equal(gdn_scratch_reserve(&scratch, 16 * page_bytes), 0);
    assert_int_equal(mincore(scratch.block, 16 * page_bytes, resident), 0);
    for (int i = 0; i < 16; i++) assert_int_equal(resident[i] & 1, 0);
    memset(scratch.block, 1, scratch.bytes);
    gdn_scratch_release(&scratch);
  }
}

static void scratch_grows_and_keeps_its_block_otherwise(void **state) {
  (void)state;
  struct gdn_scratch scratch = {0};
  assert_int_equal(gdn_scratch_reserve(&scratch, 1000), 0);
  void *block = scratch.block;
  assert_int_equal(gdn_scratch_reserve(&scratch, 10), 0);
  assert_ptr_equal(scratch.block, block);
  assert_int_equal(gdn_scratch_reserve(&scratch, 5000000), 0);
  assert_int_equal(scratch.bytes, 5000000);
  memset(scratch.block, 1, scratch.bytes);
  gdn_scratch_release(&scratch);
  assert_null(scratch.block);
}

/* ---- team: jobs ---- */

struct counts {
  struct gdn_team *team;
  _Atomic int total;
  int per_worker[MAX_WORKERS]; /* plain: handed over by the team alone */
  int phase_of[MAX_WORKERS];
};

static void count_worker(void *arg, int worker, int n_workers) {
  struct counts *c = arg;
  if (worker < 0 || worker >= n_workers) return;
  c->per_worker[worker]++;
  atomic_fetch_add(&c->total, 1);
}

static void check_every_worker_runs_once(struct gdn_team *team, int n) {
  static struct counts c;
  memset(&c, 0, sizeof c);
  for (int job = 1; job <= 50; job++) {
    gdn_team_run(team, count_worker, &c);
    assert_int_equal(atomic_load(&c.total), n * job);
    for (int i = 0; i < n; i++) assert_int_equal(c.per_worker[i], job);
  }
}

static void run_calls_every_worker_once(void **state) {
  (void)state;
  with_teams(check_every_worker_runs_once);
}

/* Every worker writes its phase, meets the others, and finds that all have written it. */
static void walk_phases(void *arg, int worker, int n_workers) {
  struct counts *c = arg;
  for (int phase = 1; phase <= N_PHASES; phase++) {
    c->phase_of[worker] = phase;
    gdn_team_barrier(c->team);
    int n_behind = 0;
    for (int i = 0; i < n_workers; i++) n_behind += c->phase_of[i] != phase;
    if (n_behind > 0) atomic_fetch_add(&c->total, n_behind);
    gdn_team_barrier(c->team);
  }
}

static void check_phases(struct gdn_team *team, int n) {
  static struct counts c;
  (void)n;
  memset(&c, 0, sizeof c);
  c.team = team;
  gdn_team_run(team, walk_phases, &c);
  gdn_team_run(team, walk_phases, &c);
  assert_int_equal(atomic_load(&c.total), 0);
}

static void barrier_keeps_phases_in_order(void **state) {
  (void)state;
  with_teams(check_phases);
}

static void bump(void *arg, int worker, int n_workers) {
  (void)n_workers;
  ((struct counts *)arg)->per_worker[worker]++;
}

static void run_100000_empty_jobs_loses_none(void **state) {
  (void)state;
  static struct counts c;
  const int n_jobs = 100000;
  for (int n = 1; n <= 2; n++) {
    struct gdn_team *team;
    memset(&c, 0, sizeof c);
    assert_int_equal(gdn_team_create(&team, n, NULL, 0), 0);
    for (int i = 0; i < n_jobs; i++) gdn_team_run(team, bump, &c);
    for (int i = 0; i < n; i++) assert_int_equal(c.per_worker[i], n_jobs);
    gdn_team_destroy(team);
  }
}

static uint32_t next_random(uint32_t *seed) {
  *seed ^= *seed << 13;
  *seed ^= *seed >> 17;
  *seed ^= *seed << 5;
  return *seed;
}

/* Delays around the spin time, so that threads are met spinning, falling asleep and asleep. */
static void random_delay(uint32_t *seed) {
  const uint32_t r = next_random(seed);
  if (r % 4 == 0) nap_us(r / 4 % 250);
  if (r % 4 == 1)
    for (volatile uint32_t i = 0; i < r / 4 % 5000; i = i + 1) {
    }
}

static void delayed_worker(void *arg, int worker, int n_workers) {
  struct counts *c = arg;
  (void)n_workers;
  uint32_t seed = (uint32_t)(c->per_worker[worker] * 977 + worker * 131 + 1);
  random_delay(&seed);
  gdn_team_barrier(c->team);
  random_delay(&seed);
  c->per_worker[worker]++;
}

static void check_random_delays(struct gdn_team *team, int n) {
  static struct counts c;
  memset(&c, 0, sizeof c);
  c.team = team;
  uint32_t seed = 20240917;
  for (int job = 1; job <= 200; job++) {
    gdn_team_run(team, delayed_worker, &c);
    for (int i = 0; i < n; i++) assert_int_equal(c.per_worker[i], job);
    random_delay(&seed);
  }
}

static void run_with_random_delays_loses_none(void **state) {
  (void)state;
  with_teams(check_random_delays);
}

static void *keep_busy(void *arg) {
  bind_to(nth_cpu(0));
  while (!atomic_load((_Atomic int *)arg)) {
  }
  return NULL;
}

static void spin_30_us(void *arg, int worker, int n_workers) {
  (void)arg;
  (void)worker;
  (void)n_workers;
  for (const int64_t end_ns = now_ns() + 30000; now_ns() < end_ns;) {
  }
}

/* The host, or another context's worker, computes where the caller waits: giving way there would cost it a whole time
 * slice, a millisecond or more, in every call. */
static void caller_on_a_busy_cpu_returns_in_time(void **state) {
  (void)state;
  enum { N_JOBS = 300 };
  if (n_cpus() < 2) skip();
  cpu_set_t before;
  sched_getaffinity(0, sizeof before, &before);
  char list[16], reason[160];
  snprintf(list, sizeof list, "%d", nth_cpu(1));
  struct gdn_topo *topo = gdn_topo_create(list, GDN_ANY_NODE, reason, sizeof reason);
  struct gdn_team *team;
  _Atomic int stop = 0;
  pthread_t busy;
  assert_int_equal(gdn_team_create(&team, 1, topo, 1), 0);
  assert_int_equal(pthread_create(&busy, NULL, keep_busy, &stop), 0);
  bind_to(nth_cpu(0));
  int64_t best_ns = INT64_MAX;
  for (int round = 0; round < 5; round++) { /* other load of the machine counts less in the best of some */
    const int64_t start_ns = now_ns();
    for (int i = 0; i < N_JOBS; i++) gdn_team_run(team, spin_30_us, NULL);
    const int64_t used_ns = now_ns() - start_ns;
    if (used_ns < best_ns) best_ns = used_ns;
  }
  atomic_store(&stop, 1);
  pthread_join(busy, NULL);
  sched_setaffinity(0, sizeof before, &before);
  print_message("job of 30 us from a busy cpu: %.0f us\n", (double)best_ns / N_JOBS * 1e-3);
  assert_in_range(best_ns / N_JOBS, 0, SANITIZED ? 2000000 : 1000000);
  gdn_team_destroy(team);
  gdn_topo_destroy(topo);
}

/* ---- team: a good guest ---- */

static int64_t process_cpu_us(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return (int64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000 + usage.ru_utime.tv_usec +
         usage.ru_stime.tv_usec;
}

static void check_idle(struct gdn_team *team, int n) {
  static struct counts c;
  (void)n;
  gdn_team_run(team, bump, &c);
  nap_us(20000);
  const int64_t before_us = process_cpu_us();
  nap_us(200000);
  const int64_t used_us = process_cpu_us() - before_us;
  assert_in_range(used_us, 0, SANITIZED ? 20000 : 1000); /* sanitizers have a thread of their own */
}

static void idle_team_uses_no_cpu(void **state) {
  (void)state;
  /* LLVM's runtime keeps the threads of earlier teams spinning for 200 ms. */
  nap_us(300000);
  for (int n = 1; n <= 4; n *= 2) {
    struct gdn_team *team;
    assert_int_equal(gdn_team_create(&team, n, NULL, 0), 0);
    check_idle(team, n);
    gdn_team_destroy(team);
    nap_us(300000);
  }
}

struct worker_state {
  unsigned mxcsr[MAX_WORKERS];
  sigset_t signals[MAX_WORKERS];
  cpu_set_t cpus[MAX_WORKERS];
};

static void tell_state(void *arg, int worker, int n_workers) {
  struct worker_state *s = arg;
  (void)n_workers;
  errno = 5;
  s->mxcsr[worker] = _mm_getcsr();
  pthread_sigmask(SIG_SETMASK, NULL, &s->signals[worker]);
  sched_getaffinity(0, sizeof s->cpus[worker], &s->cpus[worker]);
}

static void check_caller_unchanged(struct gdn_topo *topo, int n) {
  static struct worker_state s;
  cpu_set_t cpus, cpus_after;
  sigset_t signals, signals_after;
  struct gdn_team *team;
  sched_getaffinity(0, sizeof cpus, &cpus);
  pthread_sigmask(SIG_SETMASK, NULL, &signals);
  const unsigned mxcsr = _mm_getcsr();
  const int n_threads = omp_get_max_threads(), dynamic = omp_get_dynamic();
  errno = 77;
  assert_int_equal(gdn_team_create(&team, n, topo, 1), 0);
  for (int i = 0; i < 3; i++) gdn_team_run(team, tell_state, &s);
  nap_us(1000);
  gdn_team_run(team, tell_state, &s);
  if (topo) {
    assert_int_equal(gdn_team_n_bound(team, NULL), n);
    for (int i = 0; i < n; i++) assert_int_equal(CPU_COUNT(&s.cpus[i]), 1);
  } else {
    assert_int_equal(gdn_team_n_bound(team, NULL), 0);
    for (int i = 0; i < n; i++) assert_true(CPU_EQUAL(&s.cpus[i], &cpus));
  }
  gdn_team_destroy(team);
  assert_int_equal(errno, 77);
  assert_int_equal(_mm_getcsr(), mxcsr);
  assert_int_equal(omp_get_max_threads(), n_threads);
  assert_int_equal(omp_get_dynamic(), dynamic);
  sched_getaffinity(0, sizeof cpus_after, &cpus_after);
  assert_true(CPU_EQUAL(&cpus, &cpus_after));
  pthread_sigmask(SIG_SETMASK, NULL, &signals_after);
  for (int sig = 1; sig < 65; sig++)
    if (sig != 32 && sig != 33) assert_int_equal(sigismember(&signals, sig), sigismember(&signals_after, sig));
  for (int i = 0; i < n; i++) {
    assert_int_equal(s.mxcsr[i], 0x1f80);
    assert_int_equal(sigismember(&s.signals[i], SIGTERM), 1);
    assert_int_equal(sigismember(&s.signals[i], SIGSEGV), 0);
  }
}

static void caller_state_is_unchanged_and_workers_have_their_own(void **state) {
  (void)state;
  const unsigned mxcsr = _mm_getcsr();
  struct gdn_topo *topo = make_topo();
  sigset_t usr2;
  sigemptyset(&usr2);
  sigaddset(&usr2, SIGUSR2);
  pthread_sigmask(SIG_BLOCK, &usr2, NULL);
  _mm_setcsr(0x9fc0 | 0x6000); /* flush to zero, subnormals are zero, toward zero */
  omp_set_num_threads(5);
  omp_set_dynamic(1);
  for (int n = 1; n <= 3; n++) {
    check_caller_unchanged(NULL, n);
    check_caller_unchanged(topo, n);
  }
  omp_set_dynamic(0);
  omp_set_num_threads(n_cpus());
  _mm_setcsr(mxcsr);
  pthread_sigmask(SIG_UNBLOCK, &usr2, NULL);
  gdn_topo_destroy(topo);
}

static _Atomic int n_handled;

static void count_signal(int sig) {
  (void)sig;
  atomic_fetch_add(&n_handled, 1);
}

static void nap_worker(void *arg, int worker, int n_workers) {
  (void)n_workers;
  nap_us(300);
  ((struct counts *)arg)->per_worker[worker]++;
}

/* A timer's signals end the caller's sleeps early; workers never see them. */
static void run_under_signals_loses_none(void **state) {
  (void)state;
  static struct counts c;
  struct gdn_team *team;
  struct sigaction action = {.sa_handler = count_signal}, old_action;
  sigaction(SIGALRM, &action, &old_action);
  const struct itimerval every = {.it_interval = {.tv_usec = 200}, .it_value = {.tv_usec = 200}};
  const struct itimerval never = {0};
  setitimer(ITIMER_REAL, &every, NULL);
  assert_int_equal(gdn_team_create(&team, 3, NULL, 0), 0);
  for (int i = 0; i < 200; i++) gdn_team_run(team, nap_worker, &c);
  gdn_team_destroy(team);
  setitimer(ITIMER_REAL, &never, NULL);
  sigaction(SIGALRM, &old_action, NULL);
  for (int i = 0; i < 3; i++) assert_int_equal(c.per_worker[i], 200);
  assert_true(atomic_load(&n_handled) > 0);
}

static void create_destroy_200_times_leaves_threads_and_files(void **state) {
  (void)state;
  static struct counts c;
  struct gdn_topo *topo = make_topo();
  struct gdn_team *team;
  int n_threads = 0, n_files = 0;
  for (int i = 0; i <= 200; i++) {
    /* The size of the first teams is the largest: LLVM's runtime keeps as many threads as it ever needed. */
    assert_int_equal(gdn_team_create(&team, i < 2 ? 5 : 1 + i % 5, topo, 1), 0);
    gdn_team_run(team, bump, &c);
    gdn_team_destroy(team);
    if (i == 0) {
      n_threads = count_entries("/proc/self/task");
      n_files = count_entries("/proc/self/fd");
    }
    assert_int_equal(count_entries("/proc/self/task"), n_threads);
  }
  assert_int_equal(count_entries("/proc/self/fd"), n_files);
  gdn_topo_destroy(topo);
}

static void *use_own_team(void *arg) {
  static _Atomic int total;
  struct gdn_team *team;
  (void)arg;
  for (int i = 0; i < 10; i++) {
    struct counts *c = calloc(1, sizeof *c);
    if (!c || gdn_team_create(&team, 2, NULL, 0) != 0) return &total;
    c->team = team;
    gdn_team_run(team, walk_phases, c);
    const int n_behind = atomic_load(&c->total);
    gdn_team_destroy(team);
    free(c);
    if (n_behind > 0) return &total;
  }
  return NULL;
}

static void teams_side_by_side_do_not_disturb(void **state) {
  (void)state;
  pthread_t threads[3];
  for (int i = 0; i < 3; i++) assert_int_equal(pthread_create(&threads[i], NULL, use_own_team, NULL), 0);
  for (int i = 0; i < 3; i++) {
    void *failed;
    pthread_join(threads[i], &failed);
    assert_null(failed);
  }
}

/* The caller's threads are those of the same OpenMP runtime, in a region of their own. */
static void create_inside_callers_region_works(void **state) {
  (void)state;
  _Atomic int n_failed = 0, n_callers = 0;
#pragma omp parallel num_threads(3)
  {
    atomic_fetch_add(&n_callers, 1);
    if (use_own_team(NULL)) atomic_fetch_add(&n_failed, 1);
  }
  assert_int_equal(atomic_load(&n_callers), 3);
  assert_int_equal(atomic_load(&n_failed), 0);
}

/* ---- team: what cannot be had ---- */

static int exit_code(pid_t child) {
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void create_with_bad_size_fails(void **state) {
  (void)state;
  struct gdn_team *team = NULL;
  assert_int_equal(gdn_team_create(&team, 0, NULL, 0), EINVAL);
  assert_int_equal(gdn_team_create(&team, -1, NULL, 0), EINVAL);
  assert_null(team);
  gdn_team_destroy(NULL);
}

static void create_without_memory_for_threads_fails(void **state) {
  (void)state;
  if (SANITIZED) skip(); /* their shadow memory does not bear the limit */
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    struct gdn_team *team = NULL;
    long n_pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%ld", &n_pages) != 1) _exit(2);
    fclose(file);
    const rlim_t bytes = (rlim_t)n_pages * (rlim_t)sysconf(_SC_PAGESIZE) + (100u << 20);
    const struct rlimit limit = {.rlim_cur = bytes, .rlim_max = bytes};
    const int n_threads = count_entries("/proc/self/task");
    if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(3);
    if (gdn_team_create(&team, 200, NULL, 0) != EAGAIN || team) _exit(4);
    if (count_entries("/proc/self/task") != n_threads) _exit(5);
    _exit(0);
  }
  assert_int_equal(exit_code(child), 0);
}

/* Runs in a process of its own, since runtimes read the limit when they start. */
static int main_under_thread_limit(void) {
  struct gdn_team *team = NULL;
  if (gdn_team_create(&team, 6, NULL, 0) != EPERM || team) return 2;
  const int n_threads = count_entries("/proc/self/task");
  if (gdn_team_create(&team, 6, NULL, 0) != EPERM || team) return 3;
  if (count_entries("/proc/self/task") != n_threads) return 4;
  if (gdn_team_create(&team, 2, NULL, 0) != 0) return 5;
  gdn_team_destroy(team);
  return 0;
}

/* Bound by the runtime at its start, yet unbound workers may run wherever the creator might. */
static int main_under_proc_bind(void) {
  static struct worker_state s;
  struct gdn_team *team;
  cpu_set_t all;
  CPU_ZERO(&all);
  for (int i = 0; i < CPU_SETSIZE; i++) CPU_SET(i, &all);
  sched_setaffinity(0, sizeof all, &all);
  sched_getaffinity(0, sizeof all, &all);
  if (gdn_team_create(&team, 2, NULL, 0) != 0) return 2;
  gdn_team_run(team, tell_state, &s);
  gdn_team_destroy(team);
  return CPU_EQUAL(&s.cpus[0], &all) && CPU_EQUAL(&s.cpus[1], &all) ? 0 : 3;
}

/* exit() with workers asleep and in the middle of a job. */
static int main_exits_with_live_teams(void) {
  static struct counts c;
  struct gdn_team *team[2];
  if (gdn_team_create(&team[0], 2, NULL, 0) != 0 || gdn_team_create(&team[1], 3, NULL, 0) != 0) return 2;
  gdn_team_run(team[1], bump, &c);
  return 0;
}

static int run_self(const char *role, const char *name, const char *value) {
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    setenv(name, value, 1);
    execl("/proc/self/exe", "test_platform", role, (char *)NULL);
    _exit(99);
  }
  return exit_code(child);
}

static void create_beyond_openmp_thread_limit_fails(void **state) {
  (void)state;
  assert_int_equal(run_self("thread-limit", "OMP_THREAD_LIMIT", "4"), 0);
}

static void unbound_workers_escape_openmp_binding(void **state) {
  (void)state;
  assert_int_equal(run_self("proc-bind", "OMP_PROC_BIND", "true"), 0);
}

static void exit_with_live_teams_is_clean(void **state) {
  (void)state;
  assert_int_equal(run_self("live-exit", "GDN_UNUSED", "1"), 0);
}

static void new_team_after_fork_works_in_child(void **state) {
  (void)state;
  if (SANITIZED) skip(); /* ThreadSanitizer refuses threads after a fork with threads */
  static struct counts c;
  struct gdn_team *team;
  assert_int_equal(gdn_team_create(&team, 2, NULL, 0), 0);
  gdn_team_run(team, bump, &c);
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    alarm(20);
    struct gdn_team *own;
    if (gdn_team_create(&own, 3, NULL, 0) != 0) _exit(2);
    gdn_team_run(own, bump, &c);
    gdn_team_destroy(own);
    _exit(c.per_worker[2] == 1 ? 0 : 3);
  }
  assert_int_equal(exit_code(child), 0);
  gdn_team_run(team, bump, &c);
  gdn_team_destroy(team);
}

int main(int argc, char **argv) {
  if (argc > 1 && !strcmp(argv[1], "thread-limit")) return main_under_thread_limit();
  if (argc > 1 && !strcmp(argv[1], "proc-bind")) return main_under_proc_bind();
  if (argc > 1 && !strcmp(argv[1], "live-exit")) return main_exits_with_live_teams();
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(cpu_detect_gives_name_and_no_reason_for_own_flags),
      cmocka_unit_test(cpu_detect_finds_the_largest_cache),
      cmocka_unit_test(cpu_missing_names_the_lowest_reason),
      cmocka_unit_test(cpu_missing_says_why_there_are_no_tiles),
      cmocka_unit_test(cpu_without_permission_takes_the_next_tier),
      cmocka_unit_test(topo_lists_allowed_cores_and_leaves_no_trace),
      cmocka_unit_test(topo_with_one_allowed_cpu_lists_that_one),
      cmocka_unit_test(topo_of_a_list_holds_each_cpu_once),
      cmocka_unit_test(quota_is_the_smallest_on_the_way_up),
      cmocka_unit_test(mem_blocks_are_aligned_and_writable),
      cmocka_unit_test(mem_large_block_is_untouched),
      cmocka_unit_test(mem_impossible_size_gives_null_and_keeps_errno),
      cmocka_unit_test(scratch_is_untouched_whatever_its_size),
      cmocka_unit_test(scratch_grows_and_keeps_its_block_otherwise),
      cmocka_unit_test(run_calls_every_worker_once),
      cmocka_unit_test(barrier_keeps_phases_in_order),
      cmocka_unit_test(run_100000_empty_jobs_loses_none),
      cmocka_unit_test(run_with_random_delays_loses_none),
      cmocka_unit_test(caller_on_a_busy_cpu_returns_in_time),
      cmocka_unit_test(idle_team_uses_no_cpu),
      cmocka_unit_test(caller_state_is_unchanged_and_workers_have_their_own),
      cmocka_unit_test(run_under_signals_loses_none),
      cmocka_unit_test(create_destroy_200_times_leaves_threads_and_files),
      cmocka_unit_test(teams_side_by_side_do_not_disturb),
      cmocka_unit_test(create_inside_callers_region_works),
      cmocka_unit_test(create_with_bad_size_fails),
      cmocka_unit_test(create_without_memory_for_threads_fails),
      cmocka_unit_test(create_beyond_openmp_thread_limit_fails),
      cmocka_unit_test(unbound_workers_escape_openmp_binding),
      cmocka_unit_test(exit_with_live_teams_is_clean),
      cmocka_unit_test(new_team_after_fork_works_in_child),
  };
  return cmocka_run_group_tests_name("platform", tests, NULL, NULL);
}
