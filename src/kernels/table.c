/* SPDX-License-Identifier: Apache-2.0
 * The tiers of this build, lowest first: the only file that names them all. */
#include <stddef.h>

#include "gdn.h"
#include "kernels/kernels.h"
#include "platform.h"

static void fill_ref(struct gdn_kernels *t) {
  gdn_fill_recur_ref(t);
  gdn_fill_chunk_ref(t);
}

#ifdef GDN_HAVE_AVX2
static void fill_avx2(struct gdn_kernels *t) {
  gdn_fill_recur_avx2(t);
  gdn_fill_chunk_avx2(t);
}
#define FILL_AVX2 fill_avx2
#else
#define FILL_AVX2 NULL
#endif

#ifdef GDN_HAVE_AVX512
static void fill_avx512(struct gdn_kernels *t) {
  gdn_fill_recur_avx512(t);
  gdn_fill_chunk_avx512(t);
}
#define FILL_AVX512 fill_avx512
#else
#define FILL_AVX512 NULL
#endif

#ifdef GDN_HAVE_AVX512BF16
#define FILL_AVX512BF16 gdn_fill_chunk_avx512bf16
#else
#define FILL_AVX512BF16 NULL
#endif

#ifdef GDN_HAVE_AMX
#define FILL_AMX gdn_fill_chunk_amx
#else
#define FILL_AMX NULL
#endif

const struct gdn_tier gdn_tiers[] = {
    {"ref", GDN_ISA_REF, 0, fill_ref},
    {"avx2", GDN_ISA_AVX2, GDN_CPU_AVX2, FILL_AVX2},
    {"avx512", GDN_ISA_AVX512, GDN_CPU_AVX2 | GDN_CPU_AVX512, FILL_AVX512},
    {"avx512bf16", GDN_ISA_AVX512BF16, GDN_CPU_AVX512BF16, FILL_AVX512BF16},
    {"amx", GDN_ISA_AMX, GDN_CPU_AMX, FILL_AMX},
};
const int gdn_n_tiers = sizeof(gdn_tiers) / sizeof(gdn_tiers[0]);

void gdn_kernels_fill(struct gdn_kernels *t, int tier) {
  for (int i = 0; i <= tier; i++) {
    if (!gdn_tiers[i].fill) continue;
    gdn_tiers[i].fill(t);
    t->tier = gdn_tiers[i].name;
  }
}
