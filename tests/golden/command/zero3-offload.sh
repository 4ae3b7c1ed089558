OMP_NUM_THREADS=16 accelerate launch --config_file accelerate.yaml --mixed_precision no --num_processes 4 --num_machines 1 --machine_rank 0 --main_process_port 29500 train.py --epochs 3
