#!/usr/bin/env bash
# Check nmt on a machine with one NVIDIA GPU, in under 8 minutes: right first, then fast, then a training to BLEU.
#
#     PYTHONPATH=src scripts/check_gpu.sh [--data FOLDER] [--device DEVICE] [--small]
#
# Results go to $OUT (gpu-results), as results.jsonl and results.md, each as soon as it is known; a part that takes too
# long or fails does not keep the others from running. The last part needs encoded data, which no GPU has to make:
# `nmt encode -c cmn.yaml` elsewhere, and bring data/cmn along (or name its copy with --data).
# PARTS="speed decode" runs these alone. Ends with 1 if something is not as it must be.
set -u
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" OUT="${OUT:-gpu-results}" PYTHONUNBUFFERED=1
mkdir -p "$OUT" || exit 1
rm -f "$OUT"/results.jsonl "$OUT"/results.md "$OUT"/log.txt

# Seconds for each part, in the order of their worth; together under 8 minutes.
declare -A limit=([correct]=40 [bfloat16]=20 [speed]=75 [pairs]=60 [compiled]=65 [decode]=45 [ranks]=50 [resume]=25
    [train]=95)

wrong=0
for part in ${PARTS:-correct bfloat16 speed pairs compiled decode ranks resume train}; do
    # The part plans with a little less than its limit; then it is told to end, and 5 seconds later it is ended.
    timeout --signal=TERM --kill-after=5 "${limit[$part]}" \
        "${PYTHON:-python3}" scripts/check_gpu.py "$part" --out "$OUT" --seconds $((limit[$part] - 8)) "$@" \
        >>"$OUT/log.txt" 2>&1
    code=$?
    [ "$code" -eq 0 ] || { wrong=1; echo "$part: exit code $code, see $OUT/log.txt" >&2; }
done
cat "$OUT/results.md"
exit $wrong
