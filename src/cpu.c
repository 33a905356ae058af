/* SPDX-License-Identifier: Apache-2.0
 * Which instruction sets the processor has and the operating system lets a process use.
 *
 * To add a set: its flag in platform.h, its rows in features[], and one row in sets[]. AMX needs more: a palette of the
 * size that kernels expect, and the kernel's permission, which is asked for once and holds for the process. */
#include "platform.h"

#include <cpuid.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { EAX, EBX, ECX, EDX };

/* Bits of XCR0. */
#define XCR0_YMM 0x06u     /* XMM, YMM */
#define XCR0_ZMM 0xe6u     /* and opmask, upper halves, upper registers */
#define XCR0_TILE 0x600e6u /* and tile configuration, tile data */

static const struct {
  uint32_t set;
  uint32_t leaf, subleaf, reg, bit;
  const char *name; /* as in /proc/cpuinfo */
} features[] = {
    {GDN_CPU_AVX2, 1, 0, ECX, 28, "avx"},
    {GDN_CPU_AVX2, 1, 0, ECX, 12, "fma"},
    {GDN_CPU_AVX2, 1, 0, ECX, 29, "f16c"},
    {GDN_CPU_AVX2, 7, 0, EBX, 5, "avx2"},
    {GDN_CPU_AVX512, 7, 0, EBX, 16, "avx512f"},
    {GDN_CPU_AVX512, 7, 0, EBX, 30, "avx512bw"},
    {GDN_CPU_AVX512, 7, 0, EBX, 17, "avx512dq"},
    {GDN_CPU_AVX512, 7, 0, EBX, 31, "avx512vl"},
    {GDN_CPU_AVX512BF16, 7, 1, EAX, 5, "avx512_bf16"},
    {GDN_CPU_AMX, 7, 0, EDX, 24, "amx_tile"},
    {GDN_CPU_AMX, 7, 0, EDX, 22, "amx_bf16"},
};

/* Lowest first; a set stands on those of its field below. */
static const struct {
  uint32_t set, below;
  uint64_t xcr0;
  const char *registers;
} sets[] = {
    {GDN_CPU_AVX2, 0, XCR0_YMM, "ymm"},
    {GDN_CPU_AVX512, GDN_CPU_AVX2, XCR0_ZMM, "zmm"},
    {GDN_CPU_AVX512BF16, GDN_CPU_AVX2 | GDN_CPU_AVX512, XCR0_ZMM, "zmm"},
    {GDN_CPU_AMX, GDN_CPU_AVX2 | GDN_CPU_AVX512 | GDN_CPU_AVX512BF16, XCR0_TILE, "tile"},
};

enum { N_FEATURES = sizeof features / sizeof *features, N_SETS = sizeof sets / sizeof *sets };

static int cpuid_bit(uint32_t leaf, uint32_t subleaf, uint32_t reg, uint32_t bit) {
  uint32_t r[4] = {0, 0, 0, 0};
  if (!__get_cpuid_count(leaf, subleaf, &r[EAX], &r[EBX], &r[ECX], &r[EDX])) return 0;
  return r[reg] >> bit & 1;
}

static uint64_t read_xcr0(void) {
  const uint32_t osxsave = 27;
  if (!cpuid_bit(1, 0, ECX, osxsave)) return 0;
  uint32_t lo, hi;
  __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
  return (uint64_t)hi << 32 | lo;
}

static void read_name(char *name, size_t name_bytes) {
  uint32_t r[13] = {0}; /* 48 characters and an end */
  if ((uint32_t)__get_cpuid_max(0x80000000u, NULL) >= 0x80000004u)
    for (uint32_t i = 0; i < 3; i++)
      __get_cpuid(0x80000002u + i, &r[4 * i], &r[4 * i + 1], &r[4 * i + 2], &r[4 * i + 3]);
  const char *text = (const char *)r;
  while (*text == ' ') text++;
  size_t len = strlen(text);
  while (len > 0 && text[len - 1] == ' ') len--;
  if (len > 0)
    snprintf(name, name_bytes, "%.*s", (int)len, text);
  else
    snprintf(name, name_bytes, "unknown x86-64 processor");
}

/* The largest cache of a leaf that lists caches: Intel's, or AMD's of the same form. */
static int64_t largest_cache(uint32_t leaf) {
  int64_t bytes = 0;
  uint32_t r[4];
  for (uint32_t i = 0; i < 16 && __get_cpuid_count(leaf, i, &r[EAX], &r[EBX], &r[ECX], &r[EDX]) && (r[EAX] & 31); i++) {
    const int64_t n_ways = (r[EBX] >> 22) + 1, n_parts = (r[EBX] >> 12 & 1023) + 1, line_bytes = (r[EBX] & 4095) + 1;
    const int64_t one = n_ways * n_parts * line_bytes * ((int64_t)r[ECX] + 1);
    if (one > bytes) bytes = one;
  }
  return bytes;
}

/* Palette 1 has 8 tiles of 16 rows of 64 bytes. */
static int palette_fits(void) {
  uint32_t a, b, c, d;
  if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d)) return 0;
  return (b & 0xffffu) == 64 && b >> 16 >= 8 && (c & 0xffffu) >= 16;
}

/* 0, or errno of the refusal. */
static int ask_for_tiles(void) {
  enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* of arch_prctl(2) */
  const int before = errno;
  int refused = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) ? errno : 0;
  errno = before;
  return refused;
}

void gdn_cpu_detect(struct gdn_cpu *cpu) {
  memset(cpu, 0, sizeof *cpu);
  read_name(cpu->name, sizeof cpu->name);
  cpu->xcr0 = read_xcr0();
  cpu->cache_bytes = largest_cache(4);
  if (!cpu->cache_bytes) cpu->cache_bytes = largest_cache(0x8000001du);
  for (int i = 0; i < N_FEATURES; i++)
    if (cpuid_bit(features[i].leaf, features[i].subleaf, features[i].reg, features[i].bit)) cpu->features |= 1u << i;
  char reason[96];
  if (!palette_fits()) cpu->tile_errno = ENODEV;
  for (int i = 0; i < N_SETS; i++) {
    if (sets[i].set == GDN_CPU_AMX && !cpu->tile_errno && !*gdn_cpu_missing(cpu, GDN_CPU_AMX, reason, sizeof reason))
      cpu->tile_errno = ask_for_tiles();
    if (!*gdn_cpu_missing(cpu, sets[i].set, reason, sizeof reason)) cpu->flags |= sets[i].set;
  }
}

const char *gdn_cpu_missing(const struct gdn_cpu *cpu, uint32_t needed, char *text, size_t text_bytes) {
  for (int s = 0; s < N_SETS; s++)
    if (needed & sets[s].set) needed |= sets[s].below;
  for (int i = 0; i < N_FEATURES; i++) {
    if (!(needed & features[i].set) || cpu->features >> i & 1) continue;
    snprintf(text, text_bytes, "processor lacks %s", features[i].name);
    return text;
  }
  for (int s = 0; s < N_SETS; s++) {
    if (!(needed & sets[s].set) || (cpu->xcr0 & sets[s].xcr0) == sets[s].xcr0) continue;
    snprintf(text, text_bytes, "operating system does not save %s registers", sets[s].registers);
    return text;
  }
  if (text_bytes > 0) *text = '\0';
  if ((needed & GDN_CPU_AMX) && cpu->tile_errno)
    snprintf(text, text_bytes, "%s",
             cpu->tile_errno == ENODEV ? "processor has tiles of another size"
                                       : "kernel refused permission for tile data");
  return text;
}
