/*
 * A layout: how another program's ranks hold a model. docs/layouts.md describes the text; this is its parsed form.
 *
 * layout_parse text -> layout (parse.c, head.c, rule.c, pattern.c) layout_bind a tensor's name -> the rules that match
 * it (names.c) layout_other_name the rank's name <-> the checkpoint's layout_share_make which elements a rank holds,
 * and in which order (share.c) layout_buffer_make the parameters of a flat buffer (flat.c parses the options, buffer.c)
 * layout_ranges_make which of their elements a rank has in the buffer (buffer.c)
 *
 * Import asks which checkpoint tensor a rank's tensor becomes; load asks what a rank holds. Both use the same
 * arithmetic, and import checks that load would give the same files again. Only layout_read opens files. A layout is
 * immutable.
 */
#ifndef CLI_LAYOUT_LAYOUT_H
#define CLI_LAYOUT_LAYOUT_H

#include <regex.h>

#include "cli/output/output.h"

#define LAYOUT_AXES     8
#define LAYOUT_NAME     32 /* bytes of an axis's or number's name, with NUL */
#define LAYOUT_NUMBERS  4  /* different numbers per pattern */
#define LAYOUT_CAPTURES 24 /* parentheses and numbers per pattern */
#define LAYOUT_CUTS     4
#define LAYOUT_TEXT_MAX (1u << 20)
#define LAYOUT_NONE     SIZE_MAX

/* ---- the parts of a layout ---- */

typedef struct layout_axis {
    char name[LAYOUT_NAME];
    uint32_t size;
} layout_axis;

/* Some axes, slowest first. A place is a combination of their coordinates: 0 ... places - 1. */
typedef struct layout_over {
    uint8_t axes[LAYOUT_AXES];
    uint8_t count; /* 0: none */
    uint32_t places;
} layout_over;

/* Numbers in names (of layers, of experts), and which of them the ranks at each place have. */
typedef struct layout_number {
    char name[LAYOUT_NAME];
    uint32_t line;
    layout_over over;
    /*
     * as in the checkpoint's names: of place 0, then of place 1, ...; each in the order of the ranks' own numbers
     */
    uint64_t *numbers;
    size_t *begin; /* start of each place's numbers; places + 1 entries */
    bool global;   /* ranks' names use the same numbers; otherwise each rank counts from 0 */
} layout_number;

/* Names of state tensors of a parameter: `before`*`after`, on both sides. */
typedef struct layout_state {
    char *local_before, *local_after, *global_before, *global_after;
} layout_state;

/* Part of a template: of a rank file's path, or of a name. */
typedef enum layout_item_kind {
    LAYOUT_TEXT,
    LAYOUT_AXIS,
    LAYOUT_RANK,
    LAYOUT_GROUP,
    LAYOUT_NUMBER,
    LAYOUT_PART
} layout_item_kind;
typedef struct layout_item {
    layout_item_kind kind;
    uint32_t index; /* index of the axis, of the rule's number, or of the captured group */
    uint32_t width; /* minimum number of digits, for axes and ranks */
    char *text;
} layout_item;
typedef struct layout_template {
    layout_item *items;
    size_t count;
} layout_template;

/* The end of a rank file's path. */
typedef struct layout_path {
    layout_template end;
    /* only ranks with this coordinate have such a file; the path does not contain it */
    bool fixed[LAYOUT_AXES];
    uint32_t at[LAYOUT_AXES];
} layout_path;

typedef enum layout_cut_kind {
    LAYOUT_EVEN,
    LAYOUT_CHUNK,
    LAYOUT_REPEAT, /* as LAYOUT_EVEN; with fewer units than places, neighbours share a unit */
    LAYOUT_SIZES
} layout_cut_kind;

/* One dimension, cut over some axes. */
typedef struct layout_cut {
    int32_t dim; /* negative: counted back from the last one, which is -1 */
    layout_over over;
    layout_cut_kind kind;
    uint64_t *sizes; /* LAYOUT_SIZES: one per place */
    uint64_t unit;   /* elements that stay together; at least 1 */
} layout_cut;

typedef struct layout_part {
    char *name;
    uint64_t size; /* 0: all parts have the same size */
    uint64_t unit;
    bool kind_given; /* otherwise the cut's kind applies */
    layout_cut_kind kind;
} layout_part;

typedef enum layout_kind {
    LAYOUT_UNIQUE,
    LAYOUT_REPLICATED,
    LAYOUT_AVERAGED,
    LAYOUT_SHARDED,
    LAYOUT_EXPERT,
    LAYOUT_SKIPPED,
    LAYOUT_FLAT /* not a tensor of the checkpoint: several of the rank's, end to end */
} layout_kind;

/* A parameter in a list: the rank's name for it, without a state's additions, and optionally its full shape. */
typedef struct layout_member {
    layout_template name; /* its numbers are the line's */
    bool shaped;
    uint32_t ndim;
    uint64_t shape[CKD_MAX_DIMS];
} layout_member;

/*
 * A line of a list. Its parameters repeat for each combination of the numbers that the buffer's own name does not
 * contain.
 */
typedef struct layout_list_line {
    uint32_t line;
    uint8_t *only[LAYOUT_AXES]; /* as in a rule */
    uint32_t numbers[LAYOUT_NUMBERS], number_count;
    layout_member *members;
    size_t count;
} layout_list_line;

typedef struct layout_list {
    char name[LAYOUT_NAME];
    layout_list_line *lines;
    size_t count;
} layout_list;

/* The arrangement of a list's parameters in a flat buffer, and each place's share of it. */
typedef struct layout_flat {
    size_t list;
    layout_over over;
    /* elements: multiples for a place, for all places, and for the start of each parameter */
    uint64_t pad, pad_all, align;
    bool each;                 /* each parameter is padded and cut separately */
    bool stripped;             /* the padding at the end is absent */
    bool of_itself, of_states; /* which tensors are in such buffers: the parameters, their states */
    char *states;              /* if only some states: "exp_avg.*,master.*" */
} layout_flat;

/* A regular expression for names, and the meaning of its groups. */
typedef struct layout_expression {
    regex_t regex;
    bool compiled;
    uint32_t captures;                  /* total number */
    uint32_t of_number[LAYOUT_NUMBERS]; /* first group that captures the number; 0: none */
    /* 1 + index of the number that this group captures; 0: something else */
    uint32_t number_captures[LAYOUT_CAPTURES + 1];
    /* group with the axis's coordinate; the last entry is for the rank; 0: none */
    uint32_t of_axis[LAYOUT_AXES + 1];
    uint32_t of_part; /* 0: none */
} layout_expression;

typedef struct layout_rule {
    uint32_t line;
    char *pattern;
    layout_kind kind;
    bool take_first; /* copies are not compared */
    layout_cut cuts[LAYOUT_CUTS];
    uint32_t cut_count;
    uint32_t main_cut; /* the cut with parts or padding */
    bool padded;
    bool repeats; /* the main cut, or a part, is LAYOUT_REPEAT */
    /* size: elements without padding and repetition, 0: not given; pad: each place's share is a multiple of it */
    uint64_t size, pad;
    layout_part *parts;
    size_t part_count;
    /* number of groups, in each of which the parts are side by side; 0: once per rank */
    uint64_t groups;
    uint8_t *only[LAYOUT_AXES]; /* NULL: all coordinates; else 1 for the coordinates whose ranks hold it */
    layout_over numbered;       /* axes along which numbers in the name select ranks */
    uint32_t number_count;
    uint32_t numbers[LAYOUT_NUMBERS];        /* indexes in the layout */
    layout_expression local, global;         /* global: only with as= */
    bool renamed, apart;                     /* renamed: names are made by templates; apart: as= has {part} */
    layout_template local_name, global_name; /* only with as=; local_name also for LAYOUT_FLAT */
    layout_flat flat;                        /* only for LAYOUT_FLAT */
} layout_rule;

typedef struct layout {
    char *path; /* for messages */
    layout_axis axes[LAYOUT_AXES];
    uint32_t axis_count, world;
    layout_path *files;
    size_t file_count;
    layout_state *states;
    size_t state_count;
    layout_number *numbers;
    size_t number_count;
    layout_list *lists;
    size_t list_count;
    layout_rule *rules;
    size_t rule_count;
} layout;

/* ---- reading ---- */

/* Reads and parses a layout. Release with layout_release. Errors: INVALID, with file and line; NOT_FOUND, IO; NOMEM. */
ckd_status layout_read(layout **out, const char *path, ckd_error *err);
ckd_status layout_parse(layout **out, const char *text, size_t size, const char *path, ckd_error *err);
void layout_release(layout *l); /* accepts NULL */

/* Reports "FILE:LINE: message". line 0: the whole file. */
ckd_status layout_error(const layout *l, uint32_t line, ckd_error *err, ckd_status status, const char *format,
                        ...) CLI_PRINTF(5, 6);

/* ---- ranks ---- */

typedef struct layout_text {
    char text[192];
} layout_text;

void layout_coordinates(uint32_t at[LAYOUT_AXES], const layout *l, uint32_t rank);
uint32_t layout_rank(const layout *l, const uint32_t at[LAYOUT_AXES]);
uint32_t layout_place(const layout_over *over, const layout *l, const uint32_t at[LAYOUT_AXES]);
/* "rank 3 (pp=0 tp=3)" */
layout_text layout_rank_text(const layout *l, uint32_t rank);
/* "[3, 4]" */
layout_text layout_shape_text(uint32_t ndim, const uint64_t *shape);
/* Finds the rank of a file by the `files` lines. LAYOUT_NONE if none fits or the rank does not exist. */
size_t layout_rank_of_path(const layout *l, const char *path);
/*
 * Returns the path of a rank's file, relative to a folder: by the first `files` line, or rank00000.safetensors. free()
 * it. NULL: no memory.
 */
char *layout_path_of_rank(const layout *l, uint32_t rank);

/* ---- names ---- */

/* A name with a rule that matches it. */
typedef struct layout_binding {
    const layout_rule *rule;
    /* the state whose parameter the rule covers; LAYOUT_NONE: the rule covers the name itself */
    size_t state;
    char *name;                            /* without the state's additions */
    bool global;                           /* it is the checkpoint's name, not the rank's */
    uint64_t numbers[LAYOUT_NUMBERS];      /* captured from the name */
    uint64_t coordinates[LAYOUT_AXES + 1]; /* in a checkpoint's name; UINT64_MAX: absent */
    size_t part; /* in a checkpoint's name; LAYOUT_NONE: parts are kept together, or there are none */
    regoff_t begin[LAYOUT_CAPTURES + 1], end[LAYOUT_CAPTURES + 1]; /* captured groups; -1: nothing */
} layout_binding;

typedef struct layout_bindings {
    layout_binding *items; /* in rule order */
    size_t count;
} layout_bindings;

/* Finds all rules that match the name of a rank's or a checkpoint's tensor. Errors: NOMEM. */
ckd_status layout_bind(layout_bindings *out, const layout *l, const char *name, bool global, ckd_error *err);
void layout_bindings_free(layout_bindings *b);
/* Does the rule apply to this rank? If so, `numbers` become those of the other side. */
bool layout_applies(uint64_t numbers[LAYOUT_NUMBERS], const layout *l, const layout_binding *b,
                    const uint32_t at[LAYOUT_AXES]);
/* Returns the first binding that applies; NULL if none does. */
const layout_binding *layout_choose(uint64_t numbers[LAYOUT_NUMBERS], const layout *l,
                                    const layout_bindings *b, const uint32_t at[LAYOUT_AXES]);
/* The parts of a name: a rank's coordinates, the numbers in the name, and the part if parts are stored separately. */
typedef struct layout_name_values {
    const uint32_t *at;
    const uint64_t *numbers;
    size_t part;
} layout_name_values;
/* Makes the name on the other side for this rank. free() it. Errors: NOMEM. */
ckd_status layout_other_name(char **out, const layout *l, const layout_binding *b,
                             const layout_name_values *values, ckd_error *err);

/* ---- elements ---- */

/* Consecutive elements of a rank's tensor along one dimension. */
typedef struct layout_stretch {
    size_t part;     /* LAYOUT_NONE: padding */
    uint64_t offset; /* in the checkpoint's tensor */
    uint64_t length;
    /* index and number of copies on ranks of different places; 0 of 1 except for LAYOUT_REPEAT */
    uint32_t copy, copies;
} layout_stretch;

typedef struct layout_share {
    uint32_t ndim, dim; /* dim: dimension of the stretches */
    /* offsets: except in dim; lengths: the rank's shape */
    uint64_t offsets[CKD_MAX_DIMS], lengths[CKD_MAX_DIMS];
    layout_stretch *stretches;
    size_t count;
} layout_share;

/* Number of parts that are separate tensors; 1 if they are kept together. */
size_t layout_tensors_of(const layout_rule *rule);
/* Dimension of the stretches; 0 if nothing is cut; CKD_MAX_DIMS if a tensor of ndim dimensions lacks it. */
uint32_t layout_main_dim(const layout_rule *rule, uint32_t ndim);
/* The tensor or buffer to cut. */
typedef struct layout_whole {
    uint32_t ndim;
    const uint64_t *shape;  /* the main dimension is ignored where totals are needed */
    const uint64_t *totals; /* lengths along the main dimension, one for each of layout_tensors_of */
} layout_whole;
/*
 * Computes what a rank holds of such tensors. Errors: MISMATCH (it cannot be cut this way; the message says why, with
 * file and line), NOMEM. Release with layout_share_free.
 */
ckd_status layout_share_make(layout_share *out, const layout *l, const layout_rule *rule,
                             const uint32_t at[LAYOUT_AXES], const layout_whole *whole, ckd_error *err);
void layout_share_free(layout_share *share);
/*
 * Computes the shape of a rank's tensor from the full shape without padding and repetition; parts are side by side.
 * The totals follow from the shape. Errors: as above.
 */
ckd_status layout_rank_shape(uint64_t lengths[CKD_MAX_DIMS], const layout *l, const layout_rule *rule,
                             const uint32_t at[LAYOUT_AXES], const layout_whole *whole, ckd_error *err);

/* ---- flat buffers ---- */

typedef struct layout_parameter {
    char *name, *plain; /* the rank's name, with and without the state's additions */
    const layout_member *member;
    uint32_t line; /* line in the list */
} layout_parameter;

/* A flat buffer that a rank has if it has the parameters. */
typedef struct layout_buffer {
    const layout_rule *rule;
    size_t state; /* state that it holds; LAYOUT_NONE: the parameters themselves */
    char *name;   /* the rank's name */
    layout_parameter *parameters;
    size_t count, capacity;
} layout_buffer;

/*
 * Makes a buffer. values: the rank, and the numbers of the rule's pattern as in its names. Errors: MISMATCH (too many
 * parameters), NOMEM. Release with layout_buffer_free, also after a failure.
 */
ckd_status layout_buffer_make(layout_buffer *out, const layout *l, const layout_rule *rule, size_t state,
                              const layout_name_values *values, ckd_error *err);
void layout_buffer_free(layout_buffer *b);
/* Calls `each` for all buffers that the rank may have. Errors: as above, and those of `each`. */
typedef ckd_status (*layout_buffer_fn)(void *context, const layout_buffer *b, ckd_error *err);
ckd_status layout_each_buffer(const layout *l, const uint32_t at[LAYOUT_AXES], layout_buffer_fn call,
                              void *context, ckd_error *err);
/* MISMATCH if the parameter's own rule selects ranks along axes over which the buffer is cut. */
ckd_status layout_check_parameter(const layout *l, const layout_rule *flat, const layout_rule *own,
                                  const layout_parameter *p, ckd_error *err);

/* Elements first ... first + count - 1 of a tensor in row-major order, which start at `at` in their container. */
typedef struct layout_range {
    uint64_t first, count, at;
} layout_range;
/* A rank's ranges of the parameters in its buffer. */
typedef struct layout_ranges {
    const uint64_t *sizes; /* elements of each parameter */
    size_t count;
    layout_range *items; /* as many; the caller's memory */
    uint64_t length;     /* of the buffer, with padding */
} layout_ranges;
/* Computes the items and the length from the sizes. Errors: MISMATCH. */
ckd_status layout_ranges_make(layout_ranges *r, const layout *l, const layout_rule *flat,
                              const uint32_t at[LAYOUT_AXES], ckd_error *err);
/*
 * Finds the largest box of a tensor that starts at element `first` and consists of the next elements in order, at most
 * `count` (which must exist). Returns its number of elements. A scalar's box has one, in lengths[0].
 */
uint64_t layout_next_box(ckd_region *out, uint32_t ndim, const uint64_t *shape, uint64_t first,
                         uint64_t count);

#endif
