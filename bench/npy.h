/* SPDX-License-Identifier: Apache-2.0
 * Reader of NumPy .npy files, versions 1 and 2: little endian, C order, the element types of the golden cases. */
#ifndef GDN_BENCH_NPY_H
#define GDN_BENCH_NPY_H

#include <stddef.h>
#include <stdint.h>

#define NPY_DIMS_MAX 8

enum npy_type { NPY_U16, NPY_F32, NPY_I32, NPY_I64 };

struct npy {
  enum npy_type type;
  int n_dims;
  int64_t shape[NPY_DIMS_MAX];
  int64_t n_elems;
  void *data; /* C order, 64-byte aligned; valid also when n_elems is 0 */
};

/* Reads a whole file into *a, whose data the caller frees with npy_free. 0 on success; else a negative value, *a is
 * left empty, and error says what is wrong, without the path. */
int npy_load(const char *path, struct npy *a, char *error, size_t error_bytes);
void npy_free(struct npy *a);

const char *npy_type_name(enum npy_type type);

#endif
