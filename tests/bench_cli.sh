#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# gdn-bench from outside: exit statuses, error texts, JSON. Usage: bench_cli.sh GDN_BENCH GOLDEN_DIR
set -u

bench=$1
golden=$2
work=$(mktemp -d "${TMPDIR:-/tmp}/gdn-bench-cli-XXXXXX") || exit 1
trap 'rm -rf "$work"' EXIT
failures=0
unset GDN_ISA LIBXSMM_TARGET

if command -v python3 >/dev/null 2>&1; then
  python=python3
else
  python=
  echo "no python3: JSON is not parsed, only looked for"
fi

complain() {
  echo "FAIL: $*"
  failures=$((failures + 1))
}

# expect STATUS TEXT ARGUMENT...: the exit status, and TEXT somewhere in what it printed ("" = anything).
expect() {
  status=$1
  text=$2
  shift 2
  "$bench" "$@" >"$work/out" 2>"$work/err" </dev/null
  got=$?
  if [ "$got" -ne "$status" ]; then
    complain "gdn-bench $*: exit status $got, expected $status: $(cat "$work/err")"
  elif [ -n "$text" ] && ! grep -qF -e "$text" "$work/out" "$work/err"; then
    complain "gdn-bench $*: \"$text\" is not in: $(cat "$work/out" "$work/err")"
  fi
}

# expect_json EXPRESSION ARGUMENT...: status 0, one JSON document d for which the Python expression holds.
expect_json() {
  expression=$1
  shift
  expect 0 '{' "$@" --json
  if [ -n "$python" ] && ! "$python" -c "
import json, sys
d = json.load(open(sys.argv[1]))
sys.exit(0 if ($expression) else 1)" "$work/out"; then
    complain "gdn-bench $* --json: not ($expression): $(cat "$work/out")"
  fi
}

# bad_case NAME TEXT: the copy of a case in $work/NAME is refused with TEXT.
bad_case() {
  expect 2 "$2" run "$work/$1"
  if [ -s "$work/out" ]; then
    complain "a malformed case printed a result: $(cat "$work/out")"
  fi
}

copy_case() {
  cp -r "$golden/varlen_k64" "$work/$1"
  chmod -R u+w "$work/$1"
}

# A cpu that may be used, another one if there is.
cpu=$(sed -n 's/^Cpus_allowed_list:[^0-9]*\([0-9]*\).*/\1/p' /proc/self/status 2>/dev/null)
cpu=${cpu:-0}
other=$(sed -n 's/^Cpus_allowed_list:[^0-9]*[0-9]*[-,]\([0-9]*\).*/\1/p' /proc/self/status 2>/dev/null)

# ---- usage ----
expect 2 'usage'
expect 2 'unknown command ""' ''
expect 2 'unknown command "frobnicate"' frobnicate
expect 0 'commands:' --help
expect 0 'gdn-bench ' --version
for command in run prefill decode paged latency products steps halves info; do
  expect 0 "usage: gdn-bench $command" "$command" --help
  expect 2 'unknown option --frobnicate' "$command" --frobnicate
  expect 2 'expected one of ref, avx2, avx512' "$command" --isa sse9
  expect 2 'expected a whole number from 1 to' "$command" --threads 0
  expect 2 '--threads needs a value' "$command" --threads
  expect 2 '--json takes no value' "$command" --json=1
done
expect 2 'run needs DIR' run
expect 2 'unexpected argument "x"' prefill x
for lens in '' x 12y 8x 8x0 ',' '1,' -4 99999999999 65536x65536 0; do
  expect 2 '--lens' prefill --lens "$lens"
done
expect 2 'expected a whole number' prefill --heads 16k
expect 2 'GDN_E_DIM' prefill --lens 8 --dim-k 33
expect 2 'GDN_E_HEADS' prefill --lens 8 --heads 3 --v-heads 4
expect 2 'GDN_E_HEADS' decode --batch 1 --heads 3 --v-heads 4
expect 2 'the machine has' decode --batch 16777216 --v-heads 4096 --dim-k 256 --dim-v 256
expect 2 'expected seconds' prefill --seconds nan
expect 2 'tile products' products --isa ref
expect 2 'multiples of 32' steps --dim-k 33
expect 2 'a multiple of the first' steps --heads 3 --v-heads 4
expect 2 'go together' halves --first 0
expect 2 'share cpu 1' halves --first 0-1 --second 1,2
expect 2 'need two' halves --threads 1
expect 2 'expected numbers and ranges' halves --first x --second 1
expect 2 'halves of the cores' halves --cpus "$cpu"
export GDN_ISA=ref
expect 2 'not available' info --isa avx2
export GDN_ISA=nonsense
expect 2 'GDN_ISA' info
unset GDN_ISA

# ---- results ----
expect_json 'd["version"] and any(t["name"] == "ref" for t in d["tiers"]) and d["threads"] >= 1' info
expect_json 'd["isa"] == "ref" and d["threads"] == 1' info --isa=ref --threads 1
expect_json 'd["points"][0]["threads"] == 1 and all(p["empty_call"]["median_us"] > 0 for p in d["points"])' \
  latency --seconds 0
expect_json 'd["pass"] and [c["case"] for c in d["cases"]] == ["varlen_k64", "paged_k128"]
  and d["cases"][0]["checkpoint_rel_l2"] is None and 0 < d["cases"][1]["checkpoint_rel_l2"] < 1e-5' \
  run "$golden/varlen_k64/" "$golden/paged_k128"
expect_json 'd["pass"]' run --form chunk --threads 1 "$golden/varlen_k64"
expect 0 'pass' run "$golden/varlen_k64"
small='--heads 1 --v-heads 2 --dim-k 32 --dim-v 64 --seconds 0.05'
# shellcheck disable=SC2086 # the options are words
{
  expect_json 'd["n_seqs"] == 4 and d["n_tokens"] == 114 and d["runs"] >= 5 and d["efficiency"] > 0
    and abs(d["efficiency"] * d["median_us"] / d["limit_us"] - 1) < 1e-6
    and d["p10_us"] <= d["median_us"] <= d["p90_us"]
    and d["form"] in ("recurrent", "chunk") and d["baseline"] is None and d["conditions"]["cpu"]' \
    prefill --lens 7x2,100,0 $small
  expect_json 'd["form"] == "chunk"
    and all(d["baseline"][f]["median_us"] > 0 for f in ("recurrent", "chunk", "plain_c"))
    and d["baseline"]["chunk"]["median_us"] == d["median_us"]' prefill --lens 70 --form chunk --baseline $small
  expect_json 'd["isa"] == "ref" and d["limit"]["libxsmm_target"] == "wsm"' prefill --lens 9 --isa ref $small
  expect_json 'd["batch"] == 3 and d["state_bytes_per_s"] > 0 and d["rmw_bytes_per_s"] > 0 and d["efficiency"] > 0' \
    decode --batch 3 $small
  expect_json 'd["bitwise_equal"] is True and d["reused_tokens"] == 192 and d["layers"] == 48
    and abs(d["speedup"] * d["reuse_us"] / d["recompute_us"] - 1) < 1e-6 and d["slots_us"] > 0 and d["slots_share"] > 0
    and 0 < d["reuse_state_bytes"] < d["recompute_state_bytes"] and d["cases"]["decode"]["runs"] >= 5' \
    paged --requests 3 --prefix 200 --suffix 20 --steps 50 --page-size 64 $small
  expect_json 'd["bitwise_equal"] is True and d["reused_tokens"] == 0 and d["form"] == "chunk"' \
    paged --requests 2 --prefix 9 --suffix 1 --steps 1 --form chunk $small
  expect 0 'bitwise equal' paged --requests 2 --prefix 300 --page-size 128 $small
  expect 2 'page_size = 100' paged --page-size 100 $small
  if [ -n "$other" ]; then
    expect_json 'd["first"] == "'"$cpu"'" and d["second_threads"] == 1 and d["rounds"] >= 5
      and all(d["works"][w]["ratio_p10"] <= d["works"][w]["ratio"] <= d["works"][w]["ratio_p90"]
              and d["works"][w][s][c] > 0 for w in ("prefill", "products", "decode", "sweep")
              for s in ("first", "second") for c in ("alone_per_s", "beside_per_s"))
      and d["works"]["prefill"]["of_control"] > 0 and "of_control" not in d["works"]["sweep"]' \
      halves --first "$cpu" --second "$other" --lens 70,64 --batch 3 $small
    expect 0 'of control' halves --first "$cpu" --second "$other" --lens 9 --batch 1 $small
  fi
  expect_json 'd["chunks"] == 4 and d["value_head_and_chunk"]["calls_per_run"] == 8 and d["qk"]["calls_per_run"] == 4
    and all(d[s]["runs"] >= 5 and d[s]["p10_us"] <= d[s]["median_us"] <= d[s]["p90_us"]
            for s in ("qk", "gates", "mask", "solve", "delta", "out", "state"))
    and sum(d[s]["median_us"] for s in ("gates", "solve", "delta", "out")) < d["value_head_and_chunk"]["p90_us"]
    and d["core_cycles_per_us"] > 0' steps --lens 70,64,9 $small
  expect 0 'thousand cycles' steps --lens 9 --isa ref $small
  expect 0 'efficiency' prefill --lens 9 $small
  expect 0 'efficiency' decode --batch 2 $small
}

# ---- malformed cases ----
expect 2 'missing/q.npy: cannot open' run "$work/missing"
copy_case lacks
rm "$work/lacks/beta.npy"
bad_case lacks 'lacks/beta.npy: cannot open'
copy_case short
head -c 200 "$golden/varlen_k64/v.npy" >"$work/short/v.npy"
bad_case short 'short/v.npy: shape and type need'
copy_case text
echo 'not an array' >"$work/text/g.npy"
bad_case text 'text/g.npy: not an .npy file'
copy_case types
cp "$golden/varlen_k64/g.npy" "$work/types/beta.npy"
bad_case types 'types/beta.npy: elements are float32, expected uint16'
copy_case rank
cp "$golden/varlen_k64/beta.npy" "$work/rank/k.npy"
bad_case rank 'rank/k.npy: array has 2 dimensions, expected 3'
copy_case sizes
cp "$golden/varlen_k128/final_state.npy" "$work/sizes/final_state.npy"
bad_case sizes 'sizes/final_state.npy: '
copy_case pages
cp "$golden/paged_k128/page_size.npy" "$work/pages/page_size.npy"
bad_case pages 'pages/prefix_lens.npy: cannot open'
cp -r "$golden/paged_k128" "$work/starts"
chmod -R u+w "$work/starts"
cp "$work/starts/cu_seqlens.npy" "$work/starts/checkpoint_cu_starts.npy"
bad_case starts 'starts/checkpoint_cu_starts.npy: does not agree'

# ---- a case that fails its bound, and output that cannot be written ----
copy_case wrong
cp "$golden/varlen_k64/initial_state.npy" "$work/wrong/final_state.npy"
expect 1 'FAIL' run "$work/wrong"
if [ -w /dev/full ]; then
  "$bench" info >/dev/full 2>"$work/err"
  [ $? -eq 2 ] || complain "output to a full device is not an error"
fi

[ "$failures" -eq 0 ] && echo "gdn-bench: all as expected"
[ "$failures" -eq 0 ]
