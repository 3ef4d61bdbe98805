/* Checkpoints to fill catalogs with, and what tests of the catalog do again and again. */
#ifndef TESTS_SUPPORT_CATALOGS_H
#define TESTS_SUPPORT_CATALOGS_H

#include "catalog/catalog.h"

/* Sixteen bytes that depend on `seed`; never zero. */
ckd_id catalog_sample_id(uint64_t seed);

enum { SAMPLE_TENSORS = 4, SAMPLE_SHARDS = 6, SAMPLE_FILES = 2 };

/*
 * A checkpoint with two files and four tensors: boxes with different codings, flat ranges one of whose errors is not
 * known, a scalar, an empty tensor. In the order saved: "layers.0.weight", "exp_avg.layers.0.weight", "a.step",
 * "größe". Every field is set, and to another value. It may be changed; it must not be moved, `entry` points into it.
 */
typedef struct catalog_sample {
    ckd_checkpoint checkpoint;
    catalog_file files[SAMPLE_FILES];
    catalog_shard shards[SAMPLE_SHARDS];
    catalog_entry entry;
} catalog_sample;

/* generation 0, a delta on catalog_sample_id(seed - 1) whose own id is catalog_sample_id(seed). */
void catalog_sample_init(catalog_sample *s, const char *run, uint64_t step, uint64_t seed);

/* Of the store that all these catalogs belong to. */
ckd_id catalog_sample_store(void);
/* Opens dir/catalog.db; fails the test unless it works. */
catalog *catalog_sample_open(const char *dir, catalog_mode mode);
/* Adds a sample in a transaction of its own; fails the test unless it works. */
void catalog_sample_add(catalog *c, const char *run, uint64_t step, uint64_t seed);
/* dir/name, static and overwritten by the call after next. */
const char *catalog_sample_path(const char *dir, const char *name);

/* Whole files, without SQLite; they fail the test unless it works. The bytes are released with free. */
unsigned char *catalog_sample_read(const char *path, size_t *size);
void catalog_sample_write(const char *path, const unsigned char *data, size_t size);

/* What all checkpoints take by role, roles that none has left out; rows without names. */
void catalog_sample_roles(ckd_usage rows[8], size_t *count, catalog *c);

#endif
