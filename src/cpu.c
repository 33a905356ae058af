/* SPDX-License-Identifier: Apache-2.0
 * Which instruction sets the processor has and the operating system lets a process use.
 *
 * To add a set: its flag in platform.h, its rows in features[], and one row in sets[]. A set that the system grants on
 * request (AMX) needs a call in gdn_cpu_detect besides, made after the rows were found present. */
#include "platform.h"

#include <cpuid.h>
#include <stdio.h>
#include <string.h>

enum { EAX, EBX, ECX, EDX };

/* Bits of XCR0. */
#define XCR0_YMM 0x06u /* XMM, YMM */
#define XCR0_ZMM 0xe6u /* and opmask, upper halves, upper registers */

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

void gdn_cpu_detect(struct gdn_cpu *cpu) {
  memset(cpu, 0, sizeof *cpu);
  read_name(cpu->name, sizeof cpu->name);
  cpu->xcr0 = read_xcr0();
  for (int i = 0; i < N_FEATURES; i++)
    if (cpuid_bit(features[i].leaf, features[i].subleaf, features[i].reg, features[i].bit)) cpu->features |= 1u << i;
  char reason[96];
  for (int i = 0; i < N_SETS; i++)
    if (!*gdn_cpu_missing(cpu, sets[i].set, reason, sizeof reason)) cpu->flags |= sets[i].set;
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
  return text;
}
