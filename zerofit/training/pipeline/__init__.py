"""Pipeline parallelism: a model's blocks split over ranks, run by torch's pipeline schedules."""
