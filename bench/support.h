/* What the benchmarks share: time, the machine's line, training series. They exit with a message when something fails. */
#ifndef BENCH_SUPPORT_H
#define BENCH_SUPPORT_H

/* Monotonic. */
double bench_seconds(void);
/* "MODEL, N cores, M GiB, COMPILER, DATE": results mean nothing without it. Static. */
const char *bench_machine(void);
/* Trains (train_gpt beside this program) until `store` holds `saves` checkpoints of `run`, `every` steps apart; resumes. */
void bench_train(const char *store, const char *run, int saves, int every);
/* rm -r of what the benchmark made itself. */
void bench_remove_tree(const char *path);

#endif
