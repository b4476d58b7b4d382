#!/usr/bin/env bash
# The paper's experiments by name: every row of Tables 1-3, every line of Figures 1 and 2.
#
#   ./paper/reproduce.sh list                    # all names
#   ./paper/reproduce.sh table1/0.6B/oswft       # one row: train, then evaluate
#   ./paper/reproduce.sh table2 figure1          # whole tables and figures, one row after the other
#   ./paper/reproduce.sh --tiny table1/0.6B/grpo # the same on the tiny model: minutes, no GPU
#   ./paper/reproduce.sh --dry_run table3        # print the commands, run none
#   ./paper/reproduce.sh --hostfile hosts table1 -- --gradient_checkpointing --vllm_memory 0.4
#
# What follows -- goes to every training script, but flags of vLLM and of the verifier not to SFT.
# A run that several rows share is trained once. A stopped run continues where it was. What
# is done stays as it is, even if the data have changed since. Set these in the environment. Their
# paths, and the hostfile's, are absolute or relative to the repository:
#   DATA        the training file (default: data/train.jsonl, from `python -m prepare.curate`)
#   BENCHMARKS  a folder with copies of the benchmarks, instead of the hub
#   RUNS        where everything is written, one folder for one set of data
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"

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
flags=("$@") # for the training scripts
launch=(deepspeed --log_level error ${hostfile:+--hostfile "$hostfile"})
if [ -n "$hostfile" ] && [ ! -f "$hostfile" ] && ! $dry_run; then # deepspeed would use one host
  echo "error: $hostfile: no such file" >&2 && exit 2
fi

SIZES="0.6B 1.7B 4B"
ROWS=$(
  for size in $SIZES; do printf "table1/$size/%s\n" base grpo sft oswft table; done
  printf "table2/oswft/K%s\n" 1 2 4 8
  printf "table2/%s\n" grpo/K2 grpo/K4 grpo/K8 table
  printf "table3/%s\n" hard random oswft table
  printf "figure1/%s\n" $SIZES plot
  for rate in 1e-6 1e-5; do printf "figure2/$rate/%s\n" $SIZES plot; done
)

if $tiny; then
  RUNS=${RUNS:-runs/reproduce-tiny}
  lengths="--max_completion_length 48 --precision fp32"
  labels="" # the runs' folders: all three models are called "model"
  vllm=""
else
  RUNS=${RUNS:-runs/reproduce}
  DATA=${DATA:-data/train.jsonl}
  labels="--by model"
  vllm="--vllm_sleep"
fi

show() { # command...: as it can be typed
  echo "\$$(printf ' %q' "$@")"
}

call() { # command...: show it, and run it
  show "$@"
  if ! $dry_run; then "$@"; fi
}

set_model() { # run: set $size, $model and $data; a run's name begins with the size of its model
  size=${1%%-*}
  model=Qwen/Qwen3-$size-Base data=${DATA:-}
  if $tiny; then # three tiny models that differ in their seed stand in for the three sizes
    declare -A seeds=([0.6B]=0 [1.7B]=2 [4B]=3)
    model=$RUNS/base/$size/model data=$RUNS/base/$size/train.jsonl
    if [ ! -e "$RUNS/base/$size/heldout" ]; then
      call python -m demo.tiny make --output_dir "$RUNS/base/$size" --seed "${seeds[$size]}"
    fi
  fi
}

rate() { # the paper's learning rate; the tiny model needs a hundred times as much
  if $tiny; then sed 's/1e-5/1e-3/; s/1e-6/1e-4/' <<<"$1"; else echo "$1"; fi
}

train() { # run script arguments...: begin it, or go on with it, unless it is done; set $run
  run=$1
  local script=$2 taken=true word
  shift 2
  set_model "$run"
  if $tiny; then
    set -- $lengths --max_length 128 "$@" --max_steps 20 --save_every 5
  fi
  for word in "${flags[@]}"; do # a value goes the way of its flag
    case "$script $word" in
      "train_sft.py --"*vllm_* | "train_sft.py --verifier_workers"*) taken=false ;;
      *" --"*) taken=true ;;
    esac
    if $taken; then set -- "$@" "$word"; fi
  done
  if [ -e "$RUNS/$run/final" ]; then
    echo "# $RUNS/$run: done before"
    return
  fi
  if compgen -G "$RUNS/$run/checkpoint-*" >/dev/null; then
    set -- "$@" --resume "$RUNS/$run"
  elif [ -e "$RUNS/$run" ]; then
    echo "error: $RUNS/$run holds a run without a checkpoint: if it is not going on, remove it" >&2
    exit 1
  fi
  call "${launch[@]}" "$script" --model "$model" --data "$data" \
    --output_dir "$RUNS/$run" "$@"
}

sft() { # size
  train "$1-sft" train_sft.py --learning_rate "$(rate 1e-5)"
}

oswft() { # size K weighting
  train "$1-oswft-K$2-$3" train_oswft.py $vllm --learning_rate "$(rate 1e-5)" \
    --num_rollouts "$2" --weighting "$3"
}

grpo() { # size G learning_rate
  train "$1-grpo-G$2-$3" train_grpo.py $vllm --learning_rate "$(rate "$3")" --num_rollouts "$2"
}

evaluate() { # run: score its final model; of GRPO the checkpoint where the reward's plateau begins
  local folder=$RUNS/$1 output_dir=$RUNS/$1/eval arguments=()
  set_model "$1"
  if [ -e "$output_dir/results.json" ]; then # written when no answer is missing
    echo "# $output_dir: done before"
    return
  fi
  case "$1" in
    *-base) ;;
    *-grpo-*) select_checkpoint "$folder" ;; # sets $model
    *) model=$folder/final ;;
  esac
  if $tiny; then
    arguments=(--benchmark_file "$RUNS/base/$size/heldout/"{easy,middle,hard}.jsonl $lengths)
  elif [ -n "${BENCHMARKS:-}" ]; then
    arguments=(--data_dir "$BENCHMARKS")
  fi
  call "${launch[@]}" evaluate.py --model "$model" "${arguments[@]}" \
    --output_dir "$output_dir"
}

select_checkpoint() { # folder of a run of GRPO: set $model to one of its checkpoints
  local select=(python -m paper.select_checkpoint "$1")
  show "${select[@]}"
  if $dry_run; then
    model=$1/checkpoint-SELECTED
  elif [ -e "$1/final" ]; then
    model=$("${select[@]}")
  else
    echo "error: $1 has not come to its end" >&2
    exit 1
  fi
}

print_table() { # run...: a row for each
  local folders=("${@/#/$RUNS/}")
  call python -m paper.tables table "${folders[@]/%//eval}"
}

draw() { # folder figure run...: a line for each
  local folder=$RUNS/$1 figure=$2
  shift 2
  call python -m paper.plot "${@/#/$RUNS/}" --figures "$figure" $labels --output_dir "$folder"
}

row() { # name: do all that it needs
  local second third
  IFS=/ read -r _ second third <<<"$1"
  case "$1" in
    table1/*/base) run=$second-base ;;
    table1/*/sft) sft "$second" ;;
    table1/*/oswft) oswft "$second" 2 oswft ;;
    table1/*/grpo) grpo "$second" 8 1e-6 ;;
    table1/*/table) print_table "$second"-{base,grpo-G8-1e-6,sft,oswft-K2-oswft} ;;
    table2/oswft/*) oswft 0.6B "${third#K}" oswft ;;
    table2/grpo/*) grpo 0.6B "${third#K}" 1e-6 ;;
    table2/table) print_table 0.6B-oswft-K{1,2,4,8}-oswft 0.6B-grpo-G{2,4,8}-1e-6 ;;
    table3/table) print_table 0.6B-oswft-K4-{hard,random,oswft} ;;
    table3/*) oswft 0.6B 4 "$second" ;;
    figure1/plot) draw figure1 mean_weight {0.6B,1.7B,4B}-oswft-K2-oswft ;;
    figure1/*) oswft "$second" 2 oswft ;;
    figure2/*/plot) draw "figure2-$second" reward {0.6B,1.7B,4B}-"grpo-G8-$second" ;;
    figure2/*) grpo "$third" 8 "$second" ;;
  esac
  if [[ $1 = table* && $1 != */table ]]; then evaluate "$run"; fi
}

if [ ${#names[@]} = 0 ]; then
  sed -n '2,/^set/{s/^# \?//p}' paper/reproduce.sh
  exit
fi
for name in "${names[@]}"; do
  if [ "$name" = list ]; then
    echo "$ROWS"
    continue
  fi
  selected=$(echo "$ROWS" | grep -E "^$name(/|$)" || { [ "$name" = all ] && echo "$ROWS"; }) ||
    { echo "error: no row is called '$name': ./paper/reproduce.sh list" >&2 && exit 2; }
  for one in $selected; do
    echo "# ---- $one"
    row "$one"
  done
done
