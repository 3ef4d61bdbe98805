/*
 * One of several ranks that save a checkpoint together, started by a campaign.
 *
 *   campaign_ranks STORE RUN STEP FIDELITY RANK WORLD GROUP FILE
 *
 * FILE.txt has a line for each tensor of which the rank holds a part: name, dtype (the number in
 * ckptdelta.h), dimensions, shape, offsets, lengths, and where its elements begin in FILE.bin. The exit
 * status is that of the command. Rank 0 prints the id.
 */
#include <ckptdelta.h>
#include <ckptdelta_ranks.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TENSOR_COUNT_MAX = 256, NAME_MOST = 256 };

typedef struct part {
    char name[NAME_MOST];
    uint64_t shape[CKD_MAX_DIMS];
} part;

typedef struct rank_input {
    part parts[TENSOR_COUNT_MAX];
    ckd_tensor tensors[TENSOR_COUNT_MAX];
    size_t count;
    char *data;
} rank_input;

static void *read_all(const char *path) {
    FILE *f = fopen(path, "rb");
    char *data = NULL;
    long size = -1;
    if (f && fseek(f, 0, SEEK_END) == 0 && (size = ftell(f)) >= 0) {
        rewind(f);
        data = malloc((size_t)size + 1);
        if (data && fread(data, 1, (size_t)size, f) != (size_t)size) {
            free(data);
            data = NULL;
        }
    }
    if (f) {
        fclose(f);
    }
    if (data) {
        data[size] = 0;
    }
    return data;
}

static int read_numbers(FILE *f, uint64_t *out, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        unsigned long long n;
        if (fscanf(f, "%llu", &n) != 1) {
            return 0;
        }
        out[i] = n;
    }
    return 1;
}

/* Reads the next line. Returns 0 if there is none, or if it is invalid. */
static int read_tensor(rank_input *in, FILE *f) {
    part *p = &in->parts[in->count];
    ckd_tensor t = CKD_TENSOR_INIT;
    unsigned dtype, ndim;
    unsigned long long at;
    if (in->count == TENSOR_COUNT_MAX || fscanf(f, "%255s %u %u", p->name, &dtype, &ndim) != 3 ||
        ndim > CKD_MAX_DIMS) {
        return 0;
    }
    t.name = p->name;
    t.dtype = (ckd_dtype)dtype;
    t.ndim = ndim;
    t.shape = p->shape;
    t.region.kind = ndim ? CKD_REGION_BOX : CKD_REGION_WHOLE;
    if (!read_numbers(f, p->shape, ndim) || !read_numbers(f, t.region.offsets, ndim) ||
        !read_numbers(f, t.region.lengths, ndim) || fscanf(f, "%llu", &at) != 1) {
        return 0;
    }
    t.data = in->data + at;
    in->tensors[in->count++] = t;
    return 1;
}

static int read_input(rank_input *in, const char *file) {
    char path[4096];
    (void)snprintf(path, sizeof path, "%s.bin", file);
    in->data = read_all(path);
    (void)snprintf(path, sizeof path, "%s.txt", file);
    FILE *f = fopen(path, "r");
    while (in->data && f && read_tensor(in, f)) {
    }
    int whole = in->data && f && feof(f);
    if (f) {
        fclose(f);
    }
    return whole;
}

static ckd_fidelity fidelity_of(const char *name) {
    return strcmp(name, "near") == 0 ? CKD_NEAR : strcmp(name, "coarse") == 0 ? CKD_COARSE : CKD_EXACT;
}

static int fail(const ckd_error *err) {
    fprintf(stderr, "campaign_ranks: %s: %s\n", ckd_status_name(err->status), err->message);
    return err->status == CKD_E_CORRUPT ? 4 : err->status == CKD_E_NOT_FOUND ? 3 : 1;
}

int main(int argc, char **argv) {
    static rank_input in;
    if (argc != 9 || !read_input(&in, argv[8])) {
        fprintf(stderr, "campaign_ranks: wrong arguments, or an input that cannot be read\n");
        return 2;
    }
    ckd_error err = {0};
    ckd_store *store = NULL;
    ckd_ranks *ranks = NULL;
    ckd_checkpoint c = {0};
    ckd_ranks_options who = CKD_RANKS_OPTIONS_INIT;
    who.rank = (uint32_t)strtoul(argv[5], NULL, 10);
    who.world = (uint32_t)strtoul(argv[6], NULL, 10);
    who.group = argv[7];
    who.timeout_ms = 60000;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = argv[2];
    o.step = strtoull(argv[3], NULL, 10);
    o.fidelity = fidelity_of(argv[4]);
    int code = 0;
    if (ckd_store_open(&store, argv[1], CKD_OPEN_CREATE, NULL, &err) ||
        ckd_ranks_join(&ranks, store, &who, &err) ||
        ckd_ranks_save(&c, ranks, &o, in.tensors, in.count, &err)) {
        code = fail(&err);
    } else if (who.rank == 0) {
        char id[CKD_ID_TEXT];
        ckd_id_text(id, &c.id);
        printf("%s\n", id);
    }
    ckd_ranks_leave(ranks);
    ckd_store_close(store);
    free(in.data);
    return code;
}
