/* What the benchmarks share: time, the machine's line, training series. They exit with a message when something fails. */
#ifndef BENCH_SUPPORT_H
#define BENCH_SUPPORT_H

/* Monotonic. */
double bench_seconds(void);
/* Time this process has computed: what a core takes for it, however busy the machine is. */
double bench_cpu_seconds(void);
/* Bytes this process has read by system calls. */
double bench_bytes_read(void);
/* "MODEL, N cores, M GiB, COMPILER, DATE": results mean nothing without it. Static. */
const char *bench_machine(void);
/* Trains (train_gpt beside this program) until `store` holds `saves` checkpoints of `run`, `every` steps apart; resumes. */
void bench_train(const char *store, const char *run, int saves, int every);
/*
 * Runs train_gpt with these options (NULL at the end), its output dropped. Its text, unless TEXT names one, is kept beside the series:
 * what it finds on a machine changes when packages come and go, and a series cannot go on with another.
 */
void bench_run_trainer(const char *const *arguments);
/* The same without a word, its output into a file. */
void bench_run_trainer_into(const char *output, const char *const *arguments);
/* Is there such a file? */
int bench_file_exists(const char *path);
/* rm -r of what the benchmark made itself. */
void bench_remove_tree(const char *path);

#endif
