#!/bin/bash
#SBATCH --job-name=@{name}
#SBATCH --nodes=@{nodes} --ntasks-per-node=@{tasks_per_node}@{resources}
#SBATCH --time=@{time} --signal=B:USR1@@@{save_before_s}
#SBATCH --requeue --open-mode=append --output=%x-%j.out

# In an array one task's $SLURM_JOB_ID stands for all tasks.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
asked=
trap 'asked=1; scancel --signal=TERM "$job"' USR1   # @{save_before_s} s before the end: save and stop
srun --kill-on-bad-exit=0 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \
    @{command} &
step=$!
wait $step; status=$?
if [ "$asked" ]; then wait $step; status=$?; fi
if [ $status = 75 ]; then   # saved, not done
    scontrol requeue "$job"
    sleep 60   # until Slurm ends this script
fi
exit $status
