#!/usr/bin/env bash
# The paper's experiments by name: every row of Tables 1-3, every line of Figures 1 and 2.
#
#   ./reproduce.sh list                    # all names
#   ./reproduce.sh table1/0.6B/oswft       # one row: train, then evaluate
#   ./reproduce.sh table2 figure1          # whole tables and figures, one row after the other
#   ./reproduce.sh --tiny table1/0.6B/grpo # the same on the tiny model, in a minute or two, no GPU
#   ./reproduce.sh --dry_run table3        # print the commands, run none
#
# A run that several rows share is trained once; one that was stopped goes on where it was; what is
# done stays, whatever the data are by now. From the environment, as absolute paths or relative to
# this folder: DATA, the training file (default: data/train.jsonl, which `python data.py curate`
# makes); BENCHMARKS, a folder with copies of the benchmarks, instead of the hub; RUNS, where all of
# it goes, one folder for one set of data.
set -euo pipefail
cd "$(dirname "$0")"
export PATH="$PWD/.venv/bin:$PATH"

tiny=false dry_run=false names=()
for argument in "$@"; do
  case "$argument" in
    --tiny) tiny=true ;;
    --dry_run) dry_run=true ;;
    -h | --help) names=() && break ;;
    -*) echo "error: unknown option $argument" >&2 && exit 2 ;;
    *) names+=("$argument") ;;
  esac
done

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
  labels="" # the runs' folders, as all three models are called "model"
else
  labels="--by model"
  RUNS=${RUNS:-runs/reproduce}
  DATA=${DATA:-data/train.jsonl}
fi

call() { # command...: show it, and run it
  echo "\$ $*"
  if ! $dry_run; then "$@"; fi
}

setting() { # size: the model, the data, and what the machine needs, into $model $data $machine
  if $tiny; then # three tiny models that differ in their seed stand in for the three sizes
    declare -A seeds=([0.6B]=0 [1.7B]=2 [4B]=3)
    model=$RUNS/base/$1/model data=$RUNS/base/$1/train.jsonl
    machine="$lengths --max_length 128"
    if [ ! -e "$RUNS/base/$1/heldout" ]; then
      call python tiny.py make --output_dir "$RUNS/base/$1" --seed "${seeds[$1]}"
    fi
  else
    model=Qwen/Qwen3-$1-Base data=$DATA
    machine="--vllm_sleep"
    if [ "$1" = 4B ]; then machine+=" --gradient_checkpointing"; fi
  fi
}

rate() { # the paper's learning rate; the tiny model needs a hundred times as much
  if $tiny; then echo "${1/e-5/e-3}" | sed 's/e-6/e-4/'; else echo "$1"; fi
}

train() { # run size script arguments...: unless it is done, go on with it or begin
  local run=$1 size=$2 script=$3
  shift 3
  setting "$size"
  if [ "$script" = train_sft.py ]; then machine=${machine/--vllm_sleep/}; fi
  if $tiny; then set -- "$@" --max_steps 20 --save_every 5; fi
  if [ -e "$RUNS/$run/final" ]; then
    echo "# $RUNS/$run: done before"
    return
  fi
  if compgen -G "$RUNS/$run/checkpoint-*" >/dev/null; then
    set -- "$@" --resume
  elif [ -e "$RUNS/$run" ]; then
    echo "error: $RUNS/$run holds a run without a checkpoint: if it is not going on, remove it" >&2
    exit 1
  fi
  call deepspeed --log_level error "$script" --model "$model" --data "$data" \
    --output_dir "$RUNS/$run" $machine "$@"
}

evaluate() { # run size [model]: score the final model, or the one that is named
  local run=$1 size=$2
  setting "$size"
  local checkpoint=${3:-$RUNS/$run/final}
  if [ -e "$RUNS/$run/eval/results.json" ] && ! compgen -G "$RUNS/$run/eval/samples/*.rank*" >/dev/null; then
    echo "# $RUNS/$run/eval: done before"
    return
  fi
  local arguments=(${BENCHMARKS:+--data_dir "$BENCHMARKS"})
  if $tiny; then
    arguments=(--benchmark_file "$RUNS/base/$size/heldout/"{easy,middle,hard}.jsonl $lengths)
  fi
  call deepspeed --log_level error evaluate.py --model "$checkpoint" "${arguments[@]}" \
    --output_dir "$RUNS/$run/eval"
}

sft() { # size
  train "$1-sft" "$1" train_sft.py --learning_rate "$(rate 1e-5)"
}

oswft() { # size K [weighting]
  local weighting=${3:-oswft}
  train "$1-oswft-K$2-$weighting" "$1" train_oswft.py --learning_rate "$(rate 1e-5)" \
    --num_rollouts "$2" --weighting "$weighting"
}

grpo() { # size G [learning rate]
  local rate=${3:-1e-6}
  train "$1-grpo-G$2-$rate" "$1" train_grpo.py --learning_rate "$(rate "$rate")" --num_rollouts "$2"
}

evaluate_grpo() { # size G: the checkpoint where the reward has reached its plateau
  local run=$1-grpo-G$2-1e-6
  local select=(python train_grpo.py --select_checkpoint "$RUNS/$run")
  local checkpoint="\$(${select[*]})"
  if ! $dry_run; then
    if [ ! -e "$RUNS/$run/final" ]; then
      echo "error: $RUNS/$run has not come to its end" >&2
      exit 1
    fi
    echo "\$ ${select[*]}"
    checkpoint=$("${select[@]}" | tail -n 1)
  fi
  evaluate "$run" "$1" "$checkpoint"
}

print_table() { # run...: a row for each
  local runs=("${@/#/$RUNS/}")
  call python evaluate.py table "${runs[@]/%//eval}"
}

row() { # name
  local part=(${1//\// })
  case "$1" in
    table1/*/base)
      setting "${part[1]}"
      evaluate "${part[1]}-base" "${part[1]}" "$model"
      ;;
    table1/*/sft)
      sft "${part[1]}"
      evaluate "${part[1]}-sft" "${part[1]}"
      ;;
    table1/*/oswft)
      oswft "${part[1]}" 2
      evaluate "${part[1]}-oswft-K2-oswft" "${part[1]}"
      ;;
    table1/*/grpo)
      grpo "${part[1]}" 8
      evaluate_grpo "${part[1]}" 8
      ;;
    table1/*/table)
      print_table "${part[1]}"-{base,grpo-G8-1e-6,sft,oswft-K2-oswft}
      ;;
    table2/oswft/K*)
      oswft 0.6B "${1##*K}"
      evaluate "0.6B-oswft-K${1##*K}-oswft" 0.6B
      ;;
    table2/grpo/K*)
      grpo 0.6B "${1##*K}"
      evaluate_grpo 0.6B "${1##*K}"
      ;;
    table2/table)
      print_table 0.6B-oswft-K{1,2,4,8}-oswft 0.6B-grpo-G{2,4,8}-1e-6
      ;;
    table3/table)
      print_table 0.6B-oswft-K4-{hard,random,oswft}
      ;;
    table3/*)
      oswft 0.6B 4 "${part[1]}"
      evaluate "0.6B-oswft-K4-${part[1]}" 0.6B
      ;;
    figure1/plot)
      call python plot.py $(printf "$RUNS/%s-oswft-K2-oswft " $SIZES) --figures mean_weight \
        $labels --output_dir "$RUNS/figure1"
      ;;
    figure1/*) oswft "${part[1]}" 2 ;;
    figure2/*/plot)
      call python plot.py $(printf "$RUNS/%s-grpo-G8-${part[1]} " $SIZES) --figures reward \
        $labels --output_dir "$RUNS/figure2-${part[1]}"
      ;;
    figure2/*) grpo "${part[2]}" 8 "${part[1]}" ;;
  esac
}

if [ ${#names[@]} = 0 ]; then
  sed -n '2,/^set/{s/^# \?//p}' "$0"
  exit
fi
for name in "${names[@]}"; do
  if [ "$name" = list ]; then
    echo "$ROWS"
    continue
  fi
  selected=$(echo "$ROWS" | grep -E "^$name(/|$)" || { [ "$name" = all ] && echo "$ROWS"; }) ||
    { echo "error: no row is called '$name': ./reproduce.sh list" >&2 && exit 2; }
  for one in $selected; do
    echo "# ---- $one"
    row "$one"
  done
done
