#!/usr/bin/env bash
# The paper's experiments by name: every row of Tables 1-3, every line of Figures 1 and 2.
#
#   ./paper/reproduce.sh list                    # all names
#   ./paper/reproduce.sh table1/0.6B/oswft       # one row: train, then evaluate
#   ./paper/reproduce.sh table2 figure1          # whole tables and figures, one row after the other
#   ./paper/reproduce.sh --tiny table1/0.6B/grpo # the same on the tiny model: minutes, no GPU
#   ./paper/reproduce.sh --dry_run table3        # print the commands, run none
#   ./paper/reproduce.sh table1/0.6B/static      # not in the paper: weights from one pass before
#   ./paper/reproduce.sh --hostfile hosts table1 -- --gradient_checkpointing --vllm_memory 0.4
#
# What follows -- goes to every training script; SFT does not get the flags that only sampling has.
# A run that several rows share is trained once, a stopped one continues, a finished one stays as it
# is, even if the data have changed. In the environment, absolute or relative to the repository:
#   DATA        the training file (default: data/train.jsonl, from `python -m prepare.curate`)
#   BENCHMARKS  a folder with copies of the benchmarks, instead of the hub
#   RUNS        where everything is written, one folder for one set of data
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

rows() { # name, what to do (or which figure to draw), runs; a run's name says how it is trained
  local sizes="0.6B 1.7B 4B" size run k how rate
  for size in $sizes; do
    for run in base grpo-G8-1e-6 sft oswft-K2-oswft; do
      echo "table1/$size/${run%%-*} evaluate $size-$run"
    done
    echo "table1/$size/table" print "$size"-{base,grpo-G8-1e-6,sft,oswft-K2-oswft}
  done
  echo "table1/0.6B/static evaluate 0.6B-static" # ours, not the paper's: weights from one pass
  for k in 1 2 4 8; do echo "table2/oswft/K$k evaluate 0.6B-oswft-K$k-oswft"; done
  for k in 2 4 8; do echo "table2/grpo/K$k evaluate 0.6B-grpo-G$k-1e-6"; done
  echo table2/table print 0.6B-oswft-K{1,2,4,8}-oswft 0.6B-grpo-G{2,4,8}-1e-6
  for how in hard random oswft; do echo "table3/$how evaluate 0.6B-oswft-K4-$how"; done
  echo table3/table print 0.6B-oswft-K4-{hard,random,oswft}
  for size in $sizes; do echo "figure1/$size train $size-oswft-K2-oswft"; done
  echo figure1/plot mean_weight {0.6B,1.7B,4B}-oswft-K2-oswft
  for rate in 1e-6 1e-5; do
    for size in $sizes; do echo "figure2/$rate/$size train $size-grpo-G8-$rate"; done
    echo "figure2/$rate/plot" reward {0.6B,1.7B,4B}-grpo-G8-"$rate"
  done
}

tiny=false dry_run=false names=() hostfile=""
while [ $# -gt 0 ]; do
  case "$1" in
    --tiny) tiny=true ;;
    --dry_run) dry_run=true ;;
    --hostfile) hostfile=${2?--hostfile needs a file} && shift ;;
    --) shift && break ;;
    -h | --help) names=() && break ;;
    -*) echo "error: unknown option $1" >&2 && exit 2 ;;
    *) names+=("$1") ;;
  esac
  shift
done
case "${names[*]}" in
  "") sed -n '2,/^set/{s/^# \?//p}' paper/reproduce.sh && exit ;;
  list) rows | cut -d " " -f 1 && exit ;;
esac
selected=$(for name in "${names[@]}"; do
  rows | grep -E "^${name/#all/.*}(/| )" ||
    { echo "error: no row is called '$name': ./paper/reproduce.sh list" >&2 && exit 2; }
done)
if [ -n "$hostfile" ] && [ ! -f "$hostfile" ] && ! $dry_run; then # deepspeed would use one host
  echo "error: $hostfile: no such file" >&2 && exit 2
fi
launch=(deepspeed --log_level error ${hostfile:+--hostfile "$hostfile"})

call() { # command...: show it as it can be typed, and run it
  echo "\$$(printf ' %q' "$@")"
  if ! $dry_run; then "$@"; fi
}

if $tiny; then # one tiny model stands in for the three sizes
  RUNS=${RUNS:-runs/reproduce-tiny}
  DATA=$RUNS/base/train.jsonl
  problems=(--benchmark_file "$RUNS/base/heldout/"{easy,middle,hard}.jsonl)
  problems+=(--max_completion_length 48 --precision fp32)
  flags=(--max_length 128 --max_completion_length 48 --precision fp32 --max_steps 20 --save_every 5)
  if [ ! -e "$RUNS/base/heldout" ]; then call python -m demo.tiny copy --output_dir "$RUNS/base"; fi
else
  RUNS=${RUNS:-runs/reproduce}
  DATA=${DATA:-data/train.jsonl}
  problems=(${BENCHMARKS:+--data_dir "$BENCHMARKS"})
  flags=(--vllm_sleep)
fi
flags+=("$@") sft_flags=() weigh_flags=()
for word in "${flags[@]}"; do
  case "$word" in
    --max_length* | --max_completion_length* | --precision* | --reward* | --temperature* | --seed*)
      weighs=true ;;
    --*) weighs=false ;;
  esac
  if $weighs; then weigh_flags+=("$word"); fi
  case "$word" in
    --*vllm_* | --verifier_workers* | --reward* | --temperature* | --rollout_batch_size*)
      taken=false ;; # nor the value that follows
    --*) taken=true ;;
  esac
  if $taken; then sft_flags+=("$word"); fi
done

train() { # run: begin it, or continue it, unless it is done; set $folder, $method and $model
  local size number last arguments=() given=("${flags[@]}") data=$DATA
  IFS=- read -r size method number last <<<"$1"
  local script=$method
  folder=$RUNS/$1 model=Qwen/Qwen3-$size-Base
  if $tiny; then model=$RUNS/base/model; fi
  case "$method" in
    base) return ;;
    sft) arguments=(--learning_rate 1e-5) given=("${sft_flags[@]}") ;;
    static) arguments=(--learning_rate 1e-5 --weight_column weight) given=("${sft_flags[@]}")
      script=sft data=$RUNS/weighted-$size.jsonl ;;
    oswft) arguments=(--learning_rate 1e-5 --num_rollouts "${number#K}" --weighting "$last") ;;
    grpo) arguments=(--learning_rate "$last" --num_rollouts "${number#G}") ;;
  esac
  if [ -e "$folder/final" ]; then
    echo "# $folder: done before"
    return
  fi
  if [ -e "$folder/args.json" ]; then given+=(--resume "$folder"); fi
  if [ "$method" = static ]; then
    call "${launch[@]}" --module prepare.weigh --model "$model" --data "$DATA" --output "$data" \
      "${weigh_flags[@]}"
  fi
  call "${launch[@]}" "train_$script.py" --model "$model" --data "$data" --output_dir "$folder" \
    "${arguments[@]}" "${given[@]}"
}

evaluate() { # score the trained model; of GRPO the checkpoint where the reward's plateau begins
  if [ -e "$folder/eval/results.json" ]; then # written when no answer is missing
    echo "# $folder/eval: done before"
    return
  elif [ "$method" = grpo ]; then
    call python -m paper.select_checkpoint "$folder"
    model=$folder/checkpoint-SELECTED
    if ! $dry_run; then model=$(python -m paper.select_checkpoint "$folder"); fi
  elif [ "$method" != base ]; then
    model=$folder/final
  fi
  call "${launch[@]}" evaluate.py --model "$model" --output_dir "$folder/eval" "${problems[@]}"
}

while read -r name action runs <&3; do
  echo "# ---- $name"
  read -ra folders <<<"$runs"
  folders=("${folders[@]/#/$RUNS/}")
  case "$action" in
    train) train "$runs" ;;
    evaluate) train "$runs"; evaluate ;;
    print) call python -m look.tables table "${folders[@]/%//eval}" ;;
    *) call python -m look.plot "${folders[@]}" --figures "$action" \
      --output_dir "$RUNS/${name%/plot}" ;;
  esac
done 3<<<"$selected"
