/* SPDX-License-Identifier: Apache-2.0
 * In the place of src/cpu.c: a processor with every instruction set, because kernels of all of them are emulated. */
#include "platform.h"

#include <stdio.h>
#include <string.h>

void gdn_cpu_detect(struct gdn_cpu *cpu) {
  memset(cpu, 0, sizeof *cpu);
  cpu->flags = GDN_CPU_AVX2 | GDN_CPU_AVX512 | GDN_CPU_AVX512BF16 | GDN_CPU_AMX;
  snprintf(cpu->name, sizeof cpu->name, "emulated processor");
}

const char *gdn_cpu_missing(const struct gdn_cpu *cpu, uint32_t needed, char *text, size_t text_bytes) {
  (void)cpu;
  (void)needed;
  if (text_bytes > 0) *text = '\0';
  return text;
}
