"""Engine steps of a worker: run, predicted, and checked after failures.

engine_steps puts the parts together
work_loop    admit, plan, run, update        sharing       time that streams and prompts share
calibration  a sweep before the first step   engine_check  whether a failed engine can continue
"""
