/*
 * Shared by the benchmarks: time, numbers, options, files, the trainer, checkpoints. Where something fails, the
 * functions exit with a message that begins with the program's name.
 */
#ifndef BENCH_SUPPORT_H
#define BENCH_SUPPORT_H

#include <ckptdelta.h>
#include <stdint.h>
#include <stdio.h>

/* ---- time and the machine ---- */

/* Monotonic. */
double bench_seconds(void);
/* Processor time of this process: the same however busy the machine is. */
double bench_cpu_seconds(void);
/* Bytes this process has read by system calls. */
double bench_bytes_read(void);
/* "MODEL, N cores, M GiB, COMPILER, DATE": results mean nothing without it. Static. */
const char *bench_machine(void);

/* ---- numbers ---- */

void bench_sort(double *values, size_t count);
/* The upper one of the two in the middle of an even count. Sorts the values. */
double bench_median(double *values, int count);
/* The next of a sequence that is the same in every run: about normal, of variance 1. */
float bench_normal(uint64_t *seed);

/* ---- failures ---- */

void bench_die(const char *what, const char *why) __attribute__((noreturn));
/* Exits unless the status is CKD_OK. */
void bench_check(ckd_status status, const ckd_error *err);
/* Exits if it is NULL. */
void *bench_allocated(void *memory);

/* ---- options ---- */

/* An option and where its value goes: one of the pointers. Numbers are from `least` to `most`. */
typedef struct bench_option {
    const char *name; /* with its dashes */
    const char **text;
    int *number;
    uint64_t *count;
    double *real;
    ckd_fidelity *fidelity;
    int *flag; /* becomes 1; has no value */
    uint64_t least, most;
} bench_option;
/* Exits with status 2 and the options if an argument is none of them, or a value is not one. */
void bench_parse(const bench_option *options, size_t count, int argc, char **argv);
/* False: there is no fidelity of that name. */
int bench_fidelity(ckd_fidelity *out, const char *name);

/* ---- files ---- */

enum { BENCH_PATH = 4096 };
int bench_file_exists(const char *path);
FILE *bench_open_output(const char *path);
void bench_close_output(FILE *f, const char *path);
/* Makes a folder for what the benchmark writes, in `parent` (NULL: TMPDIR, or /tmp). */
void bench_make_folder(char path[BENCH_PATH], const char *parent);
/* rm -r of what the benchmark made itself. */
void bench_remove_tree(const char *path);
/* The path of a file by its name relative to the folder of this program. */
void bench_beside_program(char path[BENCH_PATH], const char *name);

/* ---- the trainer ---- */

/*
 * Runs train_gpt with these options (NULL at the end), its output dropped. Its text, unless TEXT names one, is kept
 * beside the series: the text that it finds on a machine changes with packages, and a series cannot go on with another
 * one.
 */
void bench_run_trainer(const char *const *arguments);
/* The same with its output in a file, and without a message. */
void bench_run_trainer_into(const char *output, const char *const *arguments);

/* ---- checkpoints ---- */

/*
 * Memory for the values of all tensors of a list, in its order, already written to: page faults are no cost of a load.
 */
void **bench_values_new(const ckd_tensor_list *list);
void bench_values_free(void **values, size_t count);
/* Loads every tensor of the list. */
void bench_load_values(ckd_load *load, const ckd_tensor_list *list, void **values);
/* A tensor to save like one that a store lists. */
ckd_tensor bench_tensor_like(const ckd_tensor_info *info, const void *values);

#endif
