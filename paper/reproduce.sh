#!/usr/bin/env bash
# Tables 1-3 and Figures 1 and 2 of the paper, from top to bottom: to be read, changed and pasted.
#
#     bash paper/reproduce.sh      # all of it, one command after the other
#
# What is finished is skipped, even if the data have changed; a stopped run goes on. The first
# command that fails is the last. On several hosts write `deepspeed --hostfile hosts`.
set -euo pipefail
cd "$(dirname "$0")/.."

runs=runs/paper data=data/train.jsonl
more="" # flags of every training, as --gradient_checkpointing
resume() { if [ -e $1/args.json ]; then echo --resume $1; fi; } # for a run that was stopped

# ---- Table 1: three sizes. Figure 2 has GRPO at two learning rates
for size in 0.6B 1.7B 4B; do
  model=Qwen/Qwen3-$size-Base
  run=$runs/$size/base
  [ -e $run/eval/results.json ] || deepspeed evaluate.py --model $model --output_dir $run/eval
  run=$runs/$size/sft
  [ -e $run/final ] || deepspeed train_sft.py --model $model --data $data \
    --learning_rate 1e-5 $more --output_dir $run $(resume $run)
  run=$runs/$size/oswft-K2
  [ -e $run/final ] || deepspeed train_oswft.py --model $model --data $data --num_rollouts 2 \
    --learning_rate 1e-5 --vllm_sleep $more --output_dir $run $(resume $run)
  for rate in 1e-6 1e-5; do
    run=$runs/$size/grpo-G8-$rate
    [ -e $run/final ] || deepspeed train_grpo.py --model $model --data $data --num_rollouts 8 \
      --learning_rate $rate --vllm_sleep $more --output_dir $run $(resume $run)
  done
done

# ---- Table 2: other numbers of rollouts
model=Qwen/Qwen3-0.6B-Base
for k in 1 4 8; do
  run=$runs/0.6B/oswft-K$k
  [ -e $run/final ] || deepspeed train_oswft.py --model $model --data $data --num_rollouts $k \
    --learning_rate 1e-5 --vllm_sleep $more --output_dir $run $(resume $run)
done
for g in 2 4; do
  run=$runs/0.6B/grpo-G$g-1e-6
  [ -e $run/final ] || deepspeed train_grpo.py --model $model --data $data --num_rollouts $g \
    --learning_rate 1e-6 --vllm_sleep $more --output_dir $run $(resume $run)
done

# ---- Table 3: other weights
for how in hard random; do
  run=$runs/0.6B/oswft-K4-$how
  [ -e $run/final ] || deepspeed train_oswft.py --model $model --data $data --num_rollouts 4 \
    --weighting $how --learning_rate 1e-5 --vllm_sleep $more --output_dir $run $(resume $run)
done

# ---- Not in the paper: weights that are measured once, before training
run=$runs/0.6B/sft-static weighted=$runs/0.6B/weighted.jsonl
[ -e $weighted ] || deepspeed --module prepare.weigh --model $model --data $data --output $weighted
[ -e $run/final ] || deepspeed train_sft.py --model $model --data $weighted \
  --weight_column weight --learning_rate 1e-5 $more --output_dir $run $(resume $run)

# ---- Evaluate the final models, and of GRPO the checkpoint where the reward reaches its plateau
for run in $runs/*/{sft,oswft}*; do
  [ -e $run/eval/results.json ] || deepspeed evaluate.py --model $run/final
done
for run in $runs/*/grpo-*-1e-6; do
  [ -e $run/eval/results.json ] || deepspeed evaluate.py --output_dir $run/eval \
    --model $(python -m paper.select_checkpoint $run)
done

# ---- Tables and figures
for size in 0.6B 1.7B 4B; do
  python -m look.tables table $runs/$size/{base,grpo-G8-1e-6,sft,oswft-K2}/eval
done
python -m look.tables table $runs/0.6B/{oswft-K{1,2,4,8},grpo-G{2,4,8}-1e-6}/eval
python -m look.tables table $runs/0.6B/oswft-K4{-hard,-random,}/eval
python -m look.plot $runs/*/oswft-K2 --figures mean_weight --output_dir $runs/figure1
python -m look.plot $runs/*/grpo-G8-1e-6 --figures reward --output_dir $runs/figure2/1e-6
python -m look.plot $runs/*/grpo-G8-1e-5 --figures reward --output_dir $runs/figure2/1e-5
