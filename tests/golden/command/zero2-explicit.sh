OMP_NUM_THREADS=8 accelerate launch --config_file accelerate.yaml --mixed_precision bf16 --num_processes 16 --num_machines 2 --machine_rank 0 --main_process_port 29500 train.py --epochs 3
