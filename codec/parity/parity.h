/*
 * Parity files: what rebuilds chunk files that are lost or damaged. A group is some chunk files, its members, and a few parity files, its rows. All are cut
 * into pieces of one size; the pieces with one number are a stripe, and each row has a piece for each stripe. codec/FORMAT.md, "Parity", is normative.
 */
#ifndef CODEC_PARITY_H
#define CODEC_PARITY_H

#include "base/file.h"
#include "base/hash.h"
#include "codec/common/erasure.h"
#include "codec/metadata/metadata.h"

#define PARITY_PIECE     65536u /* what writers choose */
#define PARITY_PIECE_MIN 4096u
#define PARITY_PIECE_MAX (1u << 20)
#define PARITY_FILE_MAX  (UINT64_C(1) << 43) /* bytes of a member */
#define PARITY_BEHIND    32u                 /* bytes of a stripe behind its piece and hashes */
#define PARITY_TRAILER   16u

typedef struct parity_member {
    uint32_t column;
    ckd_id file;
    uint64_t size;
    hash128 root; /* as a manifest names it */
} parity_member;

typedef struct parity_group {
    ckd_id id;
    uint32_t rows;  /* parity files of the group */
    uint32_t row;   /* this one */
    uint32_t piece; /* bytes; of the last stripe fewer */
    uint64_t created_ns;
    size_t member_count;    /* 1 to ERASURE_DATA_MAX */
    parity_member *members; /* by column, ascending */
} parity_group;
/* `to->failed` is to be checked. */
void parity_group_encode(bytes *to, const ckd_id *store, const parity_group *g);
/* Release with parity_group_free. Errors: as of every head (codec/metadata/metadata.h). */
ckd_status parity_group_decode(parity_group *out, const ckd_id *store, const void *data, size_t size,
                               const char *path, ckd_error *err);

void parity_group_free(parity_group *g); /* frees what it points to */
/* The same in all but the row? */
bool parity_group_same(const parity_group *a, const parity_group *b);

/* ---- where things stand ---- */
uint64_t parity_stripes(const parity_group *g);
/* Bytes of a row's piece in a stripe: that of the longest member. */
uint32_t parity_piece_size(const parity_group *g, uint64_t stripe);
/* Bytes of a member's own in a stripe: at most as many; the rest counts as zeros. */
uint32_t parity_member_size(const parity_group *g, size_t member, uint64_t stripe);
/* Bytes of a whole stripe in the file: the piece, the members' hashes, and what it is. */
uint32_t parity_stripe_size(const parity_group *g, uint64_t stripe);
/* Of a stripe, from the end of the first head on; parity_stripes gives that of what follows them. */
uint64_t parity_stripe_offset(const parity_group *g, uint64_t stripe);
/* The whole file. */
uint64_t parity_file_size(const parity_group *g);

/* ---- a stripe in memory: its piece, then 8 bytes for each member's hash, then what is completed here ---- */
void parity_stripe_finish(uint8_t *stripe_data, const parity_group *g, uint32_t row, uint64_t stripe);
/* Is it this stripe of this row, and undamaged? */
bool parity_stripe_valid(const uint8_t *stripe_data, const parity_group *g, uint32_t row, uint64_t stripe);
/* Is a member's part of the stripe what the (valid) stripe says? */
bool parity_member_valid(const uint8_t *stripe_data, const parity_group *g, size_t member, uint64_t stripe,
                         const void *data);
/* The end of a file, behind the second head. */
void parity_put_trailer(bytes *to, uint32_t head_size);

/* ---- reading ---- */
typedef struct parity_file {
    file_reader *file;
    parity_group group;
    uint32_t head_size;
    bool front_damaged, back_damaged; /* one of the two copies of what it says; not both */
} parity_file;
/*
 * Opens a file by either copy of what it is. CORRUPT if both are damaged; UNSUPPORTED, NOT_FOUND, IO, NOMEM. Damage of stripes, or a file that is cut off, is
 * no error here.
 */
ckd_status parity_open(parity_file **out, const ckd_id *store, const char *path, ckd_error *err);
void parity_close(parity_file *f); /* accepts NULL */
/* The stripes first ... first + count - 1, unchecked, one after the other. What the file does not have is zeros. IO. */
ckd_status parity_read(parity_file *f, uint64_t first, uint64_t count, uint8_t *to, ckd_error *err);

#endif
