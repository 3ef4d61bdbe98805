/*
 * Records how a process changes the files below a directory: every write, truncation, name and sync, in
 * order. It replaces functions of the C library, so that it also sees the calls of SQLite. Only programs that
 * link recorder.o have it.
 */
#ifndef TESTS_SUPPORT_RECORDER_H
#define TESTS_SUPPORT_RECORDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum op_kind {
    OP_WRITE,    /* `size` bytes at `offset` of `node` */
    OP_TRUNCATE, /* `node` to `offset` bytes */
    OP_SYNC,     /* data and size of `node` */
    OP_NAME,     /* `node` gets the name `name` in `dir` */
    OP_UNNAME,   /* this name is removed */
    OP_RENAME,   /* `name` in `dir` becomes `to_name` in `to_dir`, atomically */
    OP_DIR_SYNC, /* the names in `node` */
    OP_EXPECT    /* `expected` holds from here on */
} op_kind;

enum { OP_NAME_MAX = 128, OP_FRAMES = 4 };

typedef struct op {
    op_kind kind;
    unsigned node, dir, to_dir;
    char name[OP_NAME_MAX], to_name[OP_NAME_MAX];
    uint64_t offset;
    size_t size;
    unsigned char *data;
    void *frames[OP_FRAMES]; /* of a sync: its return address, and those of its callers */
    size_t expected;         /* a number that the caller chose */
} op;

/* A file or a directory. Its names may change. Node 0 is the recorded directory. */
typedef struct op_node {
    uint64_t inode;
    bool is_directory;
    unsigned char *content; /* its content when recording began */
    size_t size;
    unsigned char *live; /* its present content */
    size_t live_size;
} op_node;

typedef struct op_record {
    op *ops;
    size_t count, capacity;
    op_node *nodes;
    size_t node_count, node_capacity;
    op *names; /* names that were durable when recording began, as OP_NAME */
    size_t name_count, name_capacity;
} op_record;

/*
 * Starts to record. Everything below `path` counts as durable, except one name that may be lost (NULL: none).
 * Only one recording is possible at a time.
 */
void recorder_start(op_record *out, const char *path, const char *lost);
void recorder_expect(size_t expected);
/* Stops recording. Fails the test if a change was not recorded. */
void recorder_stop(void);
/* Stops recording without a check, after a failure. Does nothing if nothing is recorded. */
void recorder_drop(void);
void op_record_free(op_record *r);

#endif
