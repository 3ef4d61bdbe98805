/* Options and work shared by the commands that make a checkpoint: save, import and publish. */
#include "cli/commands/save_options.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/commands/fidelity.h"
#include "cli/commands/missing.h"
#include "cli/output/output.h"

#define DOUBTS_SHOWN 3

enum {
    OPT_STEP = 0x200,
    OPT_BASE,
    OPT_PARENT,
    OPT_RESUMED_FROM,
    OPT_ON_DUPLICATE,
    OPT_ROLE,
    OPT_METRIC,
    OPT_BLOB,
    OPT_CODEC,
    OPT_LEVEL,
    OPT_MAX_LOAD_COST,
    OPT_NEWEST_LOAD_COST,
    OPT_ADAMW,
    OPT_ADAM,
    OPT_SGD
};

static const struct argp_option options_table[] = {
    {0, 0, 0, 0, "Which checkpoint (required, unless it is named as RUN@STEP):", 1},
    {"run", 'r', "RUN", 0, "The run it belongs to: letters, digits and . _ - ~", 1},
    {"step", OPT_STEP, "N", 0, "Its step", 1},
    {0, 0, 0, 0, "Where it comes from:", 2},
    {"base", OPT_BASE, 0, 0, "Store it as a base, which depends on no other checkpoint", 2},
    {"parent", OPT_PARENT, "RUN@STEP", 0,
     "Store it as a delta on this checkpoint, RUN@STEP or @TAG [default: the run's newest before the step]. If that is of another run, RUN becomes a branch of it",
     2},
    {"resumed-from", OPT_RESUMED_FROM, "RUN@STEP", 0,
     "Record the checkpoint, RUN@STEP or @TAG, from which training was resumed", 2},
    {"on-duplicate", OPT_ON_DUPLICATE, "WHAT", 0,
     "What to do if the run already has this step: error [default]; same-ok: succeed if the content is identical; branch: the run was rewound, continue as RUN~2",
     2},
    {0, 0, 0, 0, "What is in it:", 3},
    {"role", OPT_ROLE, "PATTERN=ROLE", 0,
     "Tensors whose name matches the glob PATTERN have this ROLE: weight, exp_avg, exp_avg_sq, master, other. The first match wins. Otherwise the role follows from the name, as in PyTorch, DeepSpeed, Megatron, Optax and others: exp_avg.X, "
     "optimizer.state.X.exp_avg_sq and so on belong to X",
     3},
    {"blob", OPT_BLOB, "NAME=FILE", 0,
     "Store FILE with it, up to 1 GiB, as NAME: a configuration, a data loader's position. -: standard input. May be repeated",
     3},
    {"metric", OPT_METRIC, "NAME=VALUE", 0, "Record a figure with it, for example val_loss=2.71", 3},
    {0, 0, 0, 0, "The optimizer step since the previous checkpoint, if it was exactly one (see below):", 5},
    {"adamw", OPT_ADAMW, "[GLOB:]lr=X,step=N,...", 0,
     "AdamW with this learning rate, at its Nth update. Also beta1=, beta2=, eps=, weight_decay=, if they are not 0.9, 0.999, 1e-8, 0.01. GLOB: for weights whose names match; the first option that matches counts",
     5},
    {"adam", OPT_ADAM, "[GLOB:]lr=X,step=N,...", 0, "Adam, with weight decay (0) added to the gradient", 5},
    {"sgd", OPT_SGD, "[GLOB:]lr=X,momentum=X,...", 0,
     "SGD with momentum, which is in exp_avg.X. Also dampening=, nesterov=1", 5},
    {0, 0, 0, 0, "How it is stored:", 4},
    {"codec", OPT_CODEC, "NAME", 0, "auto, zstd, lz4 or raw [default: auto]", 4},
    {"level", OPT_LEVEL, "N", 0, "Effort of zstd (1 to 19) or LZ4 (1 to 12)", 4},
    {"max-load-cost", OPT_MAX_LOAD_COST, "X", 0,
     "Loading it may cost at most as much as loading X bases [default: 4]", 4},
    {"newest-load-cost", OPT_NEWEST_LOAD_COST, "X", 0,
     "The same while it is the newest of its run. Blocks that cost more also get a copy, and each save writes new copies [default: as --max-load-cost]",
     4},
    {0},
};

/* Returns the index of `text` among names separated by '|'; -1 if absent. */
static int choice(const char *text, const char *names) {
    int index = 0;
    size_t length = strlen(text);
    for (const char *at = names; at; index++) {
        const char *end = strchr(at, '|');
        if (strncmp(at, text, length) == 0 && (at[length] == '|' || !at[length])) {
            return index;
        }
        at = end ? end + 1 : NULL;
    }
    return -1;
}

static void parse_metric(cli_saving *a, const char *arg, struct argp_state *state) {
    const char *equals = strrchr(arg, '=');
    size_t length = equals ? (size_t)(equals - arg) : 0;
    if (length == 0 || length >= sizeof(a->metric_name) || !cli_parse_double(&a->save.metric, equals + 1)) {
        argp_error(state, "--metric is NAME=VALUE, a NAME of at most %zu bytes and a number, not '%s'",
                   sizeof(a->metric_name) - 1, arg);
        return;
    }
    memcpy(a->metric_name, arg, length);
    a->save.metric_name = a->metric_name;
}

static void parse_ref(cli_ref *ref, bool *is_set, const char *name, const char *arg,
                      struct argp_state *state) {
    if (!cli_parse_ref(ref, arg) || !(ref->run[0] || ref->tag[0])) {
        argp_error(state, "--%s is RUN@STEP, for example gpt@100, or @TAG, not '%s'", name, arg);
    }
    *is_set = true;
}

static void parse_cost(double *cost, const char *name, const char *arg, struct argp_state *state) {
    if (!cli_parse_double(cost, arg) || !(*cost >= 1)) {
        argp_error(state, "--%s is a number of at least 1, not '%s'", name, arg);
    }
}

static void parse_optimizer(cli_saving *a, ckd_optimizer_kind kind, const char *arg,
                            struct argp_state *state) {
    ckd_error err;
    cli_check_value(state, cli_optimizers_add(&a->optimizers, kind, arg, &err), &err);
}

/* Parses the options that control how tensors are stored. */
static error_t parse_coding(int key, char *arg, struct argp_state *state) {
    cli_saving *a = state->input;
    int index;
    uint64_t level;
    switch (key) {
    case OPT_CODEC:
        index = choice(arg, "auto|raw|zstd|lz4");
        if (index < 0) {
            argp_error(state, "--codec is auto, zstd, lz4 or raw, not '%s'", arg);
        }
        a->save.codec = (ckd_codec)index;
        return 0;
    case OPT_LEVEL:
        if (!cli_parse_u64(&level, arg) || level < 1 || level > 19) {
            argp_error(state, "--level is a number from 1 to 19, not '%s'", arg);
        }
        a->save.level = (int)level;
        return 0;
    case OPT_MAX_LOAD_COST:
        parse_cost(&a->save.max_load_cost, "max-load-cost", arg, state);
        return 0;
    case OPT_NEWEST_LOAD_COST:
        parse_cost(&a->save.newest_load_cost, "newest-load-cost", arg, state);
        return 0;
    case OPT_ADAMW:
    case OPT_ADAM:
    case OPT_SGD:
        parse_optimizer(a, (ckd_optimizer_kind)(CKD_ADAMW + key - OPT_ADAMW), arg, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

bool cli_saving_take_ref(cli_saving *a, const char *argument) {
    cli_ref ref;
    bool takes = !a->ref.run[0] && cli_parse_ref(&ref, argument) && ref.run[0] && !strchr(ref.run, '/') &&
                 access(argument, F_OK) != 0;
    a->ref = takes ? ref : a->ref;
    return takes;
}

void cli_saving_check_store(cli_saving *a, const char *first, const char *argument,
                            struct argp_state *state) {
    if (strcmp(first, "-") == 0 && cli_saving_take_ref(a, argument)) {
        argp_error(state, "name '%s' before the FILEs", argument);
    }
    if (access(first, F_OK) != 0 && cli_saving_take_ref(a, argument)) {
        argp_error(state, "there is no file '%s'; the name of a new STORE ends with a slash, as in %s/",
                   first, first);
    }
}

void cli_saving_check_standard_input(const cli_saving *a, char *const *files, size_t count,
                                     struct argp_state *state) {
    size_t uses = cli_blobs_standard(&a->blobs);
    for (size_t i = 0; i < count; i++) {
        uses += strcmp(files[i], "-") == 0;
    }
    if (uses > 1) {
        argp_error(
            state,
            "standard input can be read only once; let one FILE or --blob be '-', and name the others");
    }
}

void cli_saving_check_complete(cli_saving *a, struct argp_state *state) {
    if (a->ref.run[0]) {
        if (a->ref.step == CKD_LATEST) {
            argp_error(state, "a save needs a step of its own, and 'latest' is not one; name it as in %s@100",
                       a->ref.run);
        }
        if (a->has_run || a->has_step) {
            argp_error(state, "the checkpoint is named twice, by an argument and by options");
        }
        a->save.run = a->ref.run;
        a->save.step = a->ref.step;
        a->has_run = a->has_step = true;
    }
    if (!a->saves_nothing && (!a->has_run || !a->has_step)) {
        argp_error(state, "RUN@STEP, or --run and --step, say which checkpoint this is");
    }
    if (a->save.base && a->has_parent) {
        argp_error(state, "--base and --parent exclude each other");
    }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    cli_saving *a = state->input;
    ckd_error err;
    int index;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = state->child_inputs[1] = &a->common;
        state->child_inputs[2] = &a->save;
        state->child_inputs[3] = &a->common;
        return 0;
    case 'r':
        a->save.run = arg;
        a->has_run = true;
        return 0;
    case OPT_STEP:
        if (!cli_parse_u64(&a->save.step, arg) || a->save.step > INT64_MAX) {
            argp_error(state, "--step is a number, not '%s'", arg);
        }
        a->has_step = true;
        return 0;
    case OPT_BASE:
        a->save.base = 1;
        return 0;
    case OPT_PARENT:
        parse_ref(&a->parent, &a->has_parent, "parent", arg, state);
        return 0;
    case OPT_RESUMED_FROM:
        parse_ref(&a->resumed_from, &a->has_resumed_from, "resumed-from", arg, state);
        return 0;
    case OPT_ON_DUPLICATE:
        index = choice(arg, "error|same-ok|branch");
        if (index < 0) {
            argp_error(state, "--on-duplicate is error, same-ok or branch, not '%s'", arg);
        }
        a->save.on_duplicate = (ckd_on_duplicate)index;
        return 0;
    case OPT_ROLE:
        cli_check_value(state, cli_roles_add(&a->roles, arg, &err), &err);
        return 0;
    case OPT_BLOB:
        cli_check_value(state, cli_blobs_add(&a->blobs, arg, &err), &err);
        return 0;
    case OPT_METRIC:
        parse_metric(a, arg, state);
        return 0;
    case ARGP_KEY_END:
        cli_saving_check_complete(a, state);
        return 0;
    default:
        return parse_coding(key, arg, state);
    }
}

const struct argp cli_saving_argp = {.options = options_table,
                                     .parser = parse,
                                     .children = (const struct argp_child[]){{&cli_common_argp, 0, 0, 0},
                                                                             {&cli_threads_argp, 0, 0, 0},
                                                                             {&cli_fidelity_argp, 0, 0, 0},
                                                                             {&cli_staging_argp, 0, 0, 0},
                                                                             {0}}};

void cli_saving_free(cli_saving *a) {
    cli_roles_free(&a->roles);
    cli_blobs_free(&a->blobs);
    cli_optimizers_free(&a->optimizers);
}

/* ------------------------------------------------------------------------------------------------------ saving */

static ckd_status read_input(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    const cli_input *input = context;
    return input->read ? input->read(input->context, first, count, to, err)
                       : cli_input_read(input, first, count, to, err);
}

static ckd_status save_tensor(ckd_save *save, cli_input *input, ckd_error *err) {
    ckd_tensor tensor = CKD_TENSOR_INIT;
    tensor.name = input->tensor->name;
    tensor.role = input->role;
    tensor.weight = input->role == CKD_ROLE_WEIGHT ? NULL : input->weight;
    tensor.dtype = input->tensor->dtype;
    tensor.ndim = input->tensor->ndim;
    tensor.shape = input->tensor->shape;
    tensor.read = read_input;
    tensor.read_context = input;
    tensor.optimizer = input->optimizer;
    return ckd_save_tensor(save, &tensor, err);
}

static ckd_status save_metadata(ckd_save *save, json_t *metadata, ckd_error *err) {
    if (!metadata) {
        return CKD_OK;
    }
    char *text = safetensors_metadata_text(metadata);
    ckd_status status =
        text ? ckd_save_blob(save, METADATA_BLOB, text, strlen(text), err) : cli_error_nomem(err);
    free(text);
    return status;
}

static ckd_status save_all(ckd_checkpoint *info, ckd_store *store, const cli_saving *a, cli_inputs *inputs,
                           ckd_error *err) {
    ckd_save *save;
    ckd_status status = ckd_save_begin(&save, store, &a->save, err);
    for (size_t i = 0; i < inputs->count && status == CKD_OK; i++) {
        status = save_tensor(save, &inputs->tensors[i], err);
    }
    THEN(status, save_metadata(save, inputs->metadata, err));
    THEN(status, cli_blobs_save(&a->blobs, save, err));
    THEN(status, cli_inputs_check_unchanged(inputs, err));
    if (status == CKD_OK && cli_interrupted()) {
        status = cli_error(err, CKD_E_CANCELLED, "interrupted");
    }
    if (status == CKD_OK) {
        return ckd_save_commit(info, save, err);
    }
    ckd_save_abort(save);
    if (status == CKD_E_CANCELLED) {
        cli_error(err, CKD_E_CANCELLED, "interrupted; nothing was saved");
    }
    return status;
}

/* Replaces a tag by its checkpoint's run and step. */
static ckd_status resolve_tag(cli_ref *ref, ckd_store *store, ckd_error *err) {
    ckd_checkpoint tagged;
    ckd_status status = ref->tag[0] ? ckd_store_find_tag(&tagged, store, ref->tag, err) : CKD_OK;
    if (status == CKD_OK && ref->tag[0]) {
        memcpy(ref->run, tagged.run, sizeof(ref->run));
        ref->step = tagged.step;
    }
    return status;
}

/* Sets the ancestors given by name. `latest` of another run is resolved here, once. */
static ckd_status set_ancestors(cli_saving *a, ckd_store *store, ckd_error *err) {
    ckd_status resolved = resolve_tag(&a->parent, store, err);
    THEN(resolved, resolve_tag(&a->resumed_from, store, err));
    if (resolved != CKD_OK) {
        return resolved;
    }
    if (a->has_parent) {
        a->save.parent_run = a->parent.run;
        a->save.parent_step = a->parent.step;
    }
    if (a->has_resumed_from) {
        ckd_checkpoint from;
        ckd_status status = ckd_store_find(&from, store, a->resumed_from.run, a->resumed_from.step, err);
        if (status != CKD_OK) {
            return status;
        }
        a->save.resumed_from_run = a->resumed_from.run;
        a->save.resumed_from_step = from.step;
    }
    return CKD_OK;
}

/* ------------------------------------------------------------------------------------------------------ reporting */

static void print_saved(const cli_saving *a, const ckd_checkpoint *c, const ckd_checkpoint_list *all,
                        bool was_there) {
    if (was_there) {
        printf("%s exists already, with the same content\n", cli_ref_text_of(c).text);
        return;
    }
    const ckd_checkpoint *parent = cli_by_id(all, &c->parent);
    printf("saved %s: %s%s%s, %s in %s, %s\n", cli_ref_text_of(c).text, ckd_kind_name(c->kind),
           parent ? " on " : "", parent ? cli_ref_text_of(parent).text : "", cli_text_size(c->raw_bytes).text,
           cli_text_size(c->stored_bytes).text, cli_text_ratio(c->raw_bytes, c->stored_bytes).text);
    if (a->common.verbose) {
        char id[CKD_ID_TEXT];
        ckd_id_text(id, &c->id);
        printf("id %s, %" PRIu64 " tensor%s, depth %u, load cost %s\n", id, c->tensors,
               cli_plural(c->tensors), c->depth, cli_text_number(c->load_cost).text);
    }
}

/* Prints the errors of a lossy save, which is never silent. */
static ckd_status print_errors(const ckd_checkpoint *c, ckd_store *store, ckd_error *err) {
    ckd_tensor_list *tensors = NULL;
    ckd_status status = c->fidelity == CKD_EXACT ? CKD_OK : ckd_store_tensors(&tensors, store, &c->id, err);
    if (status == CKD_OK && tensors) {
        cli_fidelity_print(c, tensors);
    }
    ckd_tensor_list_free(tensors);
    return status;
}

static json_t *json_doubts(const cli_inputs *inputs) {
    json_t *list = json_array();
    for (size_t i = 0; i < inputs->count; i++) {
        if (inputs->tensors[i].in_doubt) {
            cli_json_append(&list, cli_json_text(inputs->tensors[i].tensor->name));
        }
    }
    return list;
}

static json_t *json_saved(const ckd_checkpoint *info, const ckd_checkpoint_list *all,
                          const cli_inputs *inputs, json_t *missing) {
    json_t *root = cli_json_one_checkpoint(info, all), *doubts = json_doubts(inputs);
    if (!root || json_object_set_new(root, "in_doubt", doubts) != 0 ||
        json_object_set(root, "missing", missing) != 0) {
        json_decref(root);
        return NULL;
    }
    return root;
}

static int print_result(const cli_saving *a, const ckd_checkpoint *info, ckd_store *store,
                        const cli_inputs *inputs, bool was_there) {
    if (strcmp(info->run, a->save.run) != 0) {
        cli_note("run '%s' was rewound: step %" PRIu64 " continues as run '%s'", a->save.run, a->save.step,
                 info->run);
    }
    ckd_error err;
    cli_relatives relatives = cli_relatives_find(store);
    json_t *missing = NULL;
    ckd_id before;
    ckd_status status = cli_missing_find(&missing, &before, store, info, inputs, &err);
    if (status == CKD_OK && !a->common.quiet && !was_there) {
        const ckd_checkpoint *older = cli_by_id(relatives.all, &before);
        cli_missing_report(missing, cli_ref_text_of(info).text, older ? cli_ref_text_of(older).text : "",
                           a->common.verbose > 0);
    }
    if (status == CKD_OK && a->common.json) {
        status = cli_json_print(json_saved(info, relatives.all, inputs, missing), &err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        print_saved(a, info, relatives.all, was_there);
        status = print_errors(info, store, &err);
    }
    cli_relatives_free(&relatives);
    json_decref(missing);
    if (status != CKD_OK) {
        (void)cli_fail(&err); /* the checkpoint exists anyway */
    }
    return CLI_DONE;
}

int cli_saving_run(cli_saving *a, cli_inputs *inputs) {
    ckd_error err;
    ckd_store *store;
    if (cli_open_store(&store, &a->common, CKD_OPEN_CREATE, &err) != CKD_OK) {
        return cli_fail(&err);
    }
    cli_progress_begin(&a->progress, "saving", a->common.quiet);
    a->save.total_bytes = inputs->bytes;
    a->save.staging_bytes = a->common.staging;
    a->save.on_progress = cli_progress_update;
    a->save.progress_context = &a->progress;
    cli_interrupt_catch();
    ckd_checkpoint before = {0}, info = {0};
    bool existed = ckd_store_find(&before, store, a->save.run, a->save.step, NULL) == CKD_OK;
    ckd_status status = set_ancestors(a, store, &err);
    THEN(status, save_all(&info, store, a, inputs, &err));
    if (status == CKD_OK) {
        cli_committed("%s is saved", cli_ref_text_of(&info).text);
    }
    cli_progress_end(&a->progress);
    bool was_there = existed && memcmp(&before.id, &info.id, sizeof(info.id)) == 0;
    int code = status == CKD_OK ? print_result(a, &info, store, inputs, was_there) : cli_fail(&err);
    if (status == CKD_E_EXISTS && !a->publishes && a->save.on_duplicate != CKD_DUPLICATE_BRANCH) {
        cli_note("%s--on-duplicate branch continues as another run",
                 a->save.on_duplicate == CKD_DUPLICATE_SAME_OK
                     ? ""
                     : "--on-duplicate same-ok accepts identical content, ");
    }
    ckd_store_close(store);
    return code;
}

static void report_unused_rules(const cli_saving *a) {
    for (size_t i = 0; i < a->roles.count && !a->common.quiet; i++) {
        if (!a->roles.rules[i].used) {
            cli_note(
                "--role '%s=%s' is unused: it matches no tensor, or only tensors that an earlier --role matches",
                a->roles.rules[i].pattern, ckd_role_name(a->roles.rules[i].role));
        }
    }
    for (size_t i = 0; i < a->optimizers.count && !a->common.quiet; i++) {
        if (!a->optimizers.rules[i].used) {
            cli_note("'%s' is unused: it matches no weight, or only weights that an earlier option matches",
                     a->optimizers.rules[i].pattern);
        }
    }
}

/* Reports tensors that would be lossy if their role were known. */
static void report_doubts(const cli_saving *a, const cli_inputs *inputs) {
    size_t count = 0;
    for (size_t i = 0; i < inputs->count; i++) {
        count += inputs->tensors[i].in_doubt;
    }
    if (count == 0 || a->common.quiet || !cli_fidelity_is_lossy(&a->save)) {
        return;
    }
    cli_note("%zu tensor%s like optimizer state but belong%s to no weight of the same shape; stored exactly "
             "(--role 'PATTERN=ROLE' says what a tensor is):",
             count, count == 1 ? " looks" : "s look", count == 1 ? "s" : "");
    size_t shown = 0;
    for (size_t i = 0; i < inputs->count && (shown < DOUBTS_SHOWN || a->common.verbose); i++) {
        if (inputs->tensors[i].in_doubt) {
            cli_note("  %s", inputs->tensors[i].tensor->name);
            shown++;
        }
    }
    if (shown < count) {
        cli_note("  and %zu more (-v names them all)", count - shown);
    }
}

/*
 * Orders the tensors. Lossy second moments determine how finely to store weights, so they come first. Exact second
 * moments are predicted from first moments, so they come after those.
 */
static ckd_status order_inputs(cli_saving *a, cli_inputs *inputs, ckd_error *err) {
    bool lossy = cli_fidelity_is_lossy(&a->save);
    ckd_status status = lossy ? cli_fidelity_order(inputs, &a->save, err) : CKD_OK;
    if (status == CKD_OK && !cli_fidelity_of_role_is_lossy(&a->save, CKD_ROLE_EXP_AVG) &&
        !cli_fidelity_of_role_is_lossy(&a->save, CKD_ROLE_EXP_AVG_SQ)) {
        status = cli_optimizers_apply(&a->optimizers, inputs, err);
    } else if (a->optimizers.count) {
        for (size_t i = 0; i < a->optimizers.count; i++) {
            a->optimizers.rules[i].used = true;
        }
        if (!a->common.quiet) {
            cli_note(
                "--adamw, --adam and --sgd are ignored: they help only with exact moments, and these are "
                "lossy");
        }
    }
    return status;
}

ckd_status cli_saving_order(cli_saving *a, cli_inputs *inputs, ckd_error *err) {
    ckd_status status = order_inputs(a, inputs, err);
    if (status == CKD_OK) {
        report_unused_rules(a);
        report_doubts(a, inputs);
    }
    return status;
}
