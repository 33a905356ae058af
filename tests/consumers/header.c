/* SPDX-License-Identifier: Apache-2.0
 * The header alone, first and twice, as C99 and as C++. */
#include <gdn.h>
/* A second time: the guard must hold. */
#include <gdn.h>

int header_version(void);

int header_version(void) {
  gdn_prefill_args args;
  args.struct_size = sizeof args;
  return (int)args.struct_size + GDN_VERSION;
}
