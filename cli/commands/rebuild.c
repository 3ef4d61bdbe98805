/* ckptdelta rebuild: rebuilds the catalog from the manifests. */
#include <inttypes.h>
#include <stdio.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

static const char doc[] =
    "Rebuild the catalog from the manifests, if it is lost or in doubt. The old one is kept as "
    "catalog.db.old. Exit status 4 if a damaged manifest had to be left out: its checkpoint is not in the new catalog."
    "\vExample:\n"
    "  ckptdelta rebuild ckpts\n";

static error_t parse(int key, char *arg, struct argp_state *state) {
    (void)arg;
    if (key != ARGP_KEY_INIT) {
        return ARGP_ERR_UNKNOWN;
    }
    state->child_inputs[0] = state->input;
    return 0;
}

static ckd_status print_result(const cli_options *options, const ckd_rebuild_result *result, ckd_error *err) {
    if (options->json) {
        return cli_json_print(json_pack("{s:i, s:I, s:I}", "schema", 1, "checkpoints",
                                        (json_int_t)result->checkpoints, "skipped",
                                        (json_int_t)result->skipped),
                              err);
    }
    if (cli_prints_text(options)) {
        bool one = result->checkpoints == 1;
        printf("rebuilt the catalog: %" PRIu64 " checkpoint%s; the times of %s (timeline) are lost\n",
               result->checkpoints, one ? "" : "s", one ? "its save" : "their saves");
    }
    return CKD_OK;
}

int cmd_rebuild(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {NULL, parse, "[STORE]", doc, children, 0, 0};
    cli_options options = {.command = "rebuild"};
    cli_parse_arguments(&argp, argc, argv, &options);
    ckd_store_options store_options = CKD_STORE_OPTIONS_INIT;
    store_options.on_message = cli_on_message;
    store_options.message_context = &options;
    ckd_rebuild_result result;
    ckd_error err;
    ckd_status status = ckd_store_rebuild(&result, options.store, &store_options, &err);
    if (status == CKD_OK) {
        cli_committed("the catalog is rebuilt");
        if (result.skipped > 0) {
            cli_left_out();
        }
        status = print_result(&options, &result, &err);
    }
    if (status == CKD_OK && result.skipped > 0) {
        status =
            cli_error(&err, CKD_E_CORRUPT,
                      "%" PRIu64 " damaged manifest%s left out of the new catalog; what %s cannot be loaded",
                      result.skipped, result.skipped == 1 ? " was" : "s were",
                      result.skipped == 1 ? "it names" : "they name");
    }
    return status == CKD_OK ? CLI_DONE : cli_fail(&err);
}
