#!/usr/bin/env bash
# polykv_bench on documents of a few blocks: its rows are complete and parse, and a result that is
# wrong ends it with an error and without a row. Says nothing about speed.
#
#   polykv_bench.sh PROGRAM
set -euo pipefail

program=$1
small=(--tokens 200 --kv-heads 2 --layers 2 --rounds 5 --threads 1 --codec "k5v4,k8v8" --head-dim 64
  --memory-mib 1)

run() { "$program" "$1" --json "${small[@]}" "${@:2}"; }

for command in attend decode encode attach; do
  run "$command" --attaches 10 | python3 -c '
import json, sys
rows = json.load(sys.stdin)["rows"]
names = ("operation codec head_dim group query_rows tokens threads path ns_per_token_kv_head read_bandwidth_fraction "
         "vs_fp16_roofline vs_torch_bf16 median_ms least_ms most_ms rounds").split()
assert rows, "no row"
for row in rows:
    missing = [name for name in names if name not in row]
    assert not missing, f"a row lacks {missing}"
    assert row["operation"] == sys.argv[1] and row["median_ms"] > 0 and row["rounds"] >= 5, row
' "$command"
  if run "$command" --attaches 1 --spoil >spoiled.json 2>spoiled.txt; then
    echo "polykv_bench $command did not notice a wrong result" >&2
    exit 1
  fi
  [ ! -s spoiled.json ] || { echo "polykv_bench $command printed rows of a wrong result" >&2; exit 1; }
  cat spoiled.txt
done

# Many query rows, another dtype and layout, and what other programs took.
cat >peers.json <<'PEERS'
{"rows": [{"operation": "attention", "dtype": "bf16", "head_dim": 64, "group": 2, "query_rows": 16, "tokens": 200,
           "threads": 1, "ns_per_token_kv_head": 1000}]}
PEERS
run attend --queries 16 --group 2 --peers peers.json | grep -q '"vs_torch_bf16": [0-9]'
run decode --dtype f32,bf16 --head-major >/dev/null
rm -f peers.json spoiled.json spoiled.txt
