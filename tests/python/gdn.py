# SPDX-License-Identifier: Apache-2.0
"""libgdn from Python: an example of a binding, in ctypes and numpy, for those who write one.

    gdn = Library("libgdn.so.0")
    with gdn.context(n_threads=8) as ctx:
        out = ctx.prefill(q, k, v, g, beta, cu_seqlens, final_state=pool)

Arrays are numpy's. bfloat16, which numpy does not have, is uint16 with the upper half of a float32's bits: to_bf16 and
from_bf16 convert. Structs and fields are named as in gdn.h, which tells shapes and meaning. ctypes gives the interpreter lock away during a call, so other Python threads run on.
"""
import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p, sizeof

import numpy as np

INTERFACE_VERSION = 1
F32, BF16, I32, I64 = 1, 2, 3, 4
L2NORM_QK = 1
FORM_RECURRENT, FORM_CHUNK = 1, 2
PLACE_CPU_LIST, PLACE_NUMA_NODE = 1, 2


# ---- gdn.h, struct by struct ----

class CtxArgs(Structure):
    _fields_ = [("struct_size", c_size_t), ("n_threads", c_int32), ("isa", c_int32), ("pin", c_int32),
                ("place", c_int32), ("cpu_list", c_char_p), ("numa_node", c_int32), ("reserved", c_int32),
                ("scratch_limit_bytes", ctypes.c_uint64)]


class Info(Structure):
    _fields_ = [("struct_size", c_size_t), ("cpu", c_char_p), ("isa", c_char_p), ("tiers", c_void_p),
                ("n_tiers", c_int32), ("n_threads", c_int32), ("n_cores", c_int32), ("pinned", c_int32),
                ("placement", c_char_p), ("product_provider", c_char_p), ("libxsmm_version", c_char_p),
                ("scratch_bytes", c_int64)]


class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("token_stride_elems", c_int64), ("head_stride_elems", c_int64),
                ("dtype", c_int32), ("reserved", c_int32)]


class States(Structure):
    _fields_ = [("data", c_void_p), ("n_rows", c_int64), ("row_stride_elems", c_int64), ("rows", c_void_p),
                ("rows_dtype", c_int32), ("dtype", c_int32), ("layout", c_int32), ("reserved", c_int32)]


class RawGates(Structure):
    _fields_ = [("a", Tensor), ("b", Tensor), ("a_log", c_void_p), ("dt_bias", c_void_p), ("a_log_dtype", c_int32),
                ("dt_bias_dtype", c_int32), ("softplus_threshold", c_float), ("reserved", c_int32)]


SHAPE = [("n_heads_k", c_int32), ("n_heads_v", c_int32), ("dim_k", c_int32), ("dim_v", c_int32), ("scale", c_float),
         ("eps", c_float)]
ARRAYS = [(name, Tensor) for name in ("q", "k", "v", "g", "beta", "out")]


class PrefillArgs(Structure):
    _fields_ = ([("struct_size", c_size_t), ("flags", c_uint32), ("form", c_int32), ("n_seqs", c_int64),
                 ("n_tokens", c_int64)] + SHAPE +
                [("cu_seqlens", c_void_p), ("cu_seqlens_dtype", c_int32), ("schedule", c_int32)] + ARRAYS +
                [("initial_state", States), ("final_state", States), ("prefix_lens", c_void_p),
                 ("prefix_lens_dtype", c_int32), ("checkpoint_cu_starts_dtype", c_int32),
                 ("checkpoint_every_n_tokens", c_int64), ("checkpoint_cu_starts", c_void_p), ("checkpoints", States),
                 ("n_heads_q", c_int32), ("reserved_2", c_int32), ("raw_gates", RawGates)])


class DecodeArgs(Structure):
    _fields_ = ([("struct_size", c_size_t), ("flags", c_uint32), ("n_tokens", c_int32), ("n_seqs", c_int64)] + SHAPE +
                ARRAYS + [("initial_state", States), ("final_state", States), ("token_counts", c_void_p),
                          ("token_counts_dtype", c_int32), ("n_heads_q", c_int32), ("token_states", States),
                          ("raw_gates", RawGates)])


class PageTable(Structure):
    _fields_ = [("struct_size", c_size_t), ("n_seqs", c_int64), ("n_pages", c_int64), ("page_size", c_int64),
                ("n_page_indices", c_int64), ("page_indices", c_void_p), ("page_indptr", c_void_p),
                ("last_page_len", c_void_p), ("cu_seqlens", c_void_p), ("prefix_lens", c_void_p),
                ("index_dtype", c_int32), ("reserved", c_int32)]


class PagedArgs(Structure):
    _fields_ = [("struct_size", c_size_t), ("pool", States), ("table", POINTER(PageTable)), ("slots", c_void_p)]


def _function(result, *arguments):
    return ctypes.CFUNCTYPE(result, *arguments)


class Interface(Structure):
    """The table that gdn_get_interface returns; functions that this example does not call are plain pointers."""
    _fields_ = [("struct_size", c_size_t), ("interface_version", c_uint32), ("library_version", c_uint32),
                ("version", c_void_p), ("version_string", _function(c_char_p)),
                ("status_name", _function(c_char_p, c_int32)), ("last_error", _function(c_char_p)),
                ("ctx_create", _function(c_int32, POINTER(CtxArgs), POINTER(c_void_p))),
                ("ctx_destroy", _function(None, c_void_p)),
                ("ctx_info", _function(c_int32, c_void_p, POINTER(Info))), ("ctx_run", c_void_p),
                ("prefill", _function(c_int32, c_void_p, POINTER(PrefillArgs))), ("prefill_form", c_void_p),
                ("decode", _function(c_int32, c_void_p, POINTER(DecodeArgs))), ("paged_slots_bytes", c_void_p),
                ("paged_slots", c_void_p),
                ("prefill_paged", _function(c_int32, c_void_p, POINTER(PrefillArgs), POINTER(PagedArgs))),
                ("decode_paged", _function(c_int32, c_void_p, POINTER(DecodeArgs), POINTER(PagedArgs))),
                ("gating", c_void_p)]


# ---- arrays ----

def to_bf16(x):
    """Rounds float32 to bfloat16, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def _tensor(x):
    """[token][head][dim] or [token][head], also a slice of something larger: only the last dimension must be dense."""
    if x is None:
        return Tensor()
    dtype = {"float32": F32, "uint16": BF16}[x.dtype.name]
    if x.ndim == 3 and x.shape[2] > 1 and x.strides[2] != x.itemsize:
        raise ValueError("elements of a head must be adjacent")
    return Tensor(x.ctypes.data, x.strides[0] // x.itemsize, x.strides[1] // x.itemsize, dtype)


def _int_dtype(x):
    return {"int32": I32, "int64": I64}[x.dtype.name]


def _address(x):
    return x.ctypes.data if x is not None else None


def _states(pool, rows=None):
    """[row][head][V][K] float32."""
    if pool is None:
        return States()
    return States(pool.ctypes.data, pool.shape[0], pool.strides[0] // pool.itemsize, _address(rows),
                  _int_dtype(rows) if rows is not None else 0, F32)


def _fill_shape(args, q, v, g, k, beta, out, l2norm, scale):
    args.struct_size = sizeof(args)
    args.flags = L2NORM_QK if l2norm else 0
    args.n_heads_k, args.dim_k = q.shape[1:]
    args.n_heads_v, args.dim_v = v.shape[1:]
    args.scale = scale
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta), ("out", out)):
        setattr(args, name, _tensor(x))


# ---- the library ----

class GdnError(Exception):
    pass


class Library:
    def __init__(self, path):
        self._dll = ctypes.CDLL(path)
        self._dll.gdn_get_interface.restype = POINTER(Interface)
        self._dll.gdn_get_interface.argtypes = [c_uint32]
        self._dll.gdn_last_error.restype = c_char_p
        table = self._dll.gdn_get_interface(INTERFACE_VERSION)
        if not table or table.contents.struct_size < sizeof(Interface):
            raise GdnError(self._dll.gdn_last_error().decode())
        self.table = table.contents

    def check(self, status):
        if status:
            raise GdnError(f"{self.table.status_name(status).decode()}: {self.table.last_error().decode()}")

    def context(self, **options):
        return Context(self, **options)


class Context:
    """options: fields of gdn_ctx_args, cpu_list as bytes."""

    def __init__(self, library, **options):
        self.library, self._ctx = library, c_void_p()
        args = CtxArgs(struct_size=sizeof(CtxArgs), **options)
        library.check(library.table.ctx_create(byref(args), byref(self._ctx)))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.library.table.ctx_destroy(self._ctx)
        self._ctx = None

    def info(self):
        info = Info(struct_size=sizeof(Info))
        self.library.check(self.library.table.ctx_info(self._ctx, byref(info)))
        return info

    def prefill(self, q, k, v, g, beta, cu_seqlens, *, initial_state=None, final_state=None, rows=None, l2norm=True,
                scale=0.0, form=0):
        """Returns out [n_tokens][n_heads_v][dim_v] as bfloat16; final_state is written in place."""
        args, out = self._prefill_args(q, k, v, g, beta, cu_seqlens, l2norm, scale, form)
        args.initial_state = _states(initial_state, rows)
        args.final_state = _states(final_state, rows)
        self.library.check(self.library.table.prefill(self._ctx, byref(args)))
        return out

    def prefill_paged(self, q, k, v, g, beta, cu_seqlens, pool, table, *, l2norm=True, scale=0.0):
        """table: (page_size, page_indices, page_indptr, last_page_len), index arrays of one type."""
        args, out = self._prefill_args(q, k, v, g, beta, cu_seqlens, l2norm, scale, 0)
        paged, kept = self._paged(pool, table, len(cu_seqlens) - 1)
        self.library.check(self.library.table.prefill_paged(self._ctx, byref(args), byref(paged)))
        del kept
        return out

    def decode(self, q, k, v, g, beta, pool, rows=None, *, l2norm=True, scale=0.0):
        """One token per sequence; the pool's states are updated in place."""
        args, out = DecodeArgs(n_seqs=q.shape[0]), np.empty(v.shape, np.uint16)
        _fill_shape(args, q, v, g, k, beta, out, l2norm, scale)
        args.initial_state = args.final_state = _states(pool, rows)
        self.library.check(self.library.table.decode(self._ctx, byref(args)))
        return out

    @staticmethod
    def _prefill_args(q, k, v, g, beta, cu_seqlens, l2norm, scale, form):
        args, out = PrefillArgs(n_seqs=len(cu_seqlens) - 1, n_tokens=q.shape[0], form=form), np.empty(v.shape, np.uint16)
        _fill_shape(args, q, v, g, k, beta, out, l2norm, scale)
        args.cu_seqlens, args.cu_seqlens_dtype = _address(cu_seqlens), _int_dtype(cu_seqlens)
        return args, out

    @staticmethod
    def _paged(pool, table, n_seqs):
        page_size, indices, indptr, last_len = table
        c_table = PageTable(sizeof(PageTable), n_seqs, pool.shape[0], page_size, len(indices), _address(indices),
                            _address(indptr), _address(last_len), None, None, _int_dtype(indices), 0)
        paged = PagedArgs(struct_size=sizeof(PagedArgs), pool=_states(pool), table=ctypes.pointer(c_table))
        return paged, c_table
