"""Pipeline parallelism in a rank: a model's blocks split over ranks, run by torch's schedules."""
