/*
 * engine/roles: finds the roles of tensors and their weights by the names that frameworks use. The names are those of
 * PyTorch 2.15, DeepSpeed, Megatron and Optax.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/ckptdelta.h"
#include "engine/common/common.h"

#define W  CKD_ROLE_WEIGHT
#define M  CKD_ROLE_EXP_AVG
#define V  CKD_ROLE_EXP_AVG_SQ
#define MA CKD_ROLE_MASTER
#define O  CKD_ROLE_OTHER

/* ---- single names ---- */

static const struct {
    const char *name;
    ckd_role role;
} names[] = {
    {"layers.0.weight", W},
    {"model.embed_tokens.weight", W},
    {"encoder.state_proj.weight", W},
    {"state_dict.layer.weight", W},
    {"state.params.Dense_0.kernel", W},
    {"bn.running_var", W},
    {"ema.layer.weight", W},
    {"step", W}, /* a single number is always exact */
    {"exp_avg.layer.weight", M},
    {"exp_avg_sq.layer.weight", V},
    {"max_exp_avg_sq.layer.weight", V},
    {"master.layer.weight", MA},
    {"optimizer.state.layers.0.weight.exp_avg", M},
    {"optimizer.state.layers.0.weight.exp_avg_sq", V},
    {"optimizer.state.layers.0.weight.max_exp_avg_sq", V},
    {"optimizer.state.layers.0.weight.step", O},
    {"optimizer.state.seq.0.weight.momentum_buffer", M},
    {"optim.layers.0.weight.exp_avg", M},
    {"state.layers.0.weight.exp_avg_sq", V},
    {"layers.0.weight.exp_avg", M},
    {"layers.0.weight/exp_avg.pt", M},
    {"layers.0.weight/exp_avg_sq.pt", V},
    {"layers.0.weight/fp32.pt", MA},
    {"zero.layers.0.weight.fp32", MA},
    {"optimizer.state.exp_avg.decoder.layers.weight", M},
    {"optimizer.state.fp32_param.decoder.layers.weight", MA},
    {"chained_0.optimizer.state.exp_avg_sq.decoder.layers.weight", V},
    {"opt_state.0.mu.params.Dense_0.kernel", M},
    {"opt_state.0.nu.params.Dense_0.kernel", V},
    {"opt_state.0.trace.params.Dense_0.kernel", M},
    {"opt_state/0/mu/params/Dense_0/kernel", M},
    {"opt_state.0.count", O},
    {"optimizer.state.emb.weight.row_var", O},
    {"optimizer.state.emb.weight.col_var", O},
    {"optimizer.state.emb.weight.exp_avg_sq_row", O},
    {"optimizer.state.emb.weight.variance", O},
    {"optimizer.state.emb.weight.square_avg", V},
    /* A number identifies no parameter without the optimizer's order. Unknown names are not taken for weights. */
    {"state.0.exp_avg", O},
    {"optimizer.state.0.exp_avg_sq", O},
    {"optimizer_states.0.state.3.exp_avg", O},
    {"optimizer_state_dict.base_optimizer_state.state.0.exp_avg", O},
    {"optimizer_state_dict.single_partition_of_fp32_groups.0", O},
    {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.param", O},
    {"optimizer.state.emb.weight.sum", O},
    {"optimizer.state.emb.weight.exp_inf", O},
    {"optimizer.state.0.state1", O},
    {"optimizer.param_groups.0.lr", O},
    {"state.0.z", O},
    {"opt_state.1.ema", O},
    {"mu.params.kernel", O},
    {"nu.params.kernel", O},
    {"encoder.mu.weight", O},
    {"momentum.layer.weight", O},
    {"variance.layer.weight", O},
    {"layer.weight.grad_sq", O},
    {"fp32_groups_flat.0", O},
    {"master_weights.layer.weight", O},
    {"adam_m.layer.weight", O},
    {"dense/kernel/Adam_1", O},
};

static void test_one_name(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        ckd_role role = ckd_role_of(names[i].name, CKD_F32);
        if (role != names[i].role) {
            fail_msg("%s is %s, not %s", names[i].name, ckd_role_name(role), ckd_role_name(names[i].role));
        }
        assert_int_equal(ckd_role_of(names[i].name, CKD_I64), CKD_ROLE_OTHER);
    }
    assert_int_equal(ckd_role_of(NULL, CKD_F32), CKD_ROLE_WEIGHT);
    assert_int_equal(ckd_role_of("", CKD_F32), CKD_ROLE_WEIGHT);
}

static void check_family(const char *name, const char *expected) {
    size_t size = 0;
    const char *family = role_name_family(name, strlen(name), &size);
    if (!expected) {
        assert_null(family);
        return;
    }
    assert_non_null(family);
    if (size != strlen(expected) || memcmp(family, expected, size) != 0) {
        fail_msg("%s belongs to '%.*s', not to '%s'", name, (int)size, family, expected);
    }
}

static void test_parameter_of_a_name(void **state) {
    (void)state;
    check_family("layers.0.weight", "layers.0.weight");
    check_family("exp_avg.layers.0.weight", "layers.0.weight");
    check_family("exp_avg.0.weight", "0.weight");
    check_family("optim.state.0.weight.exp_avg", "0.weight");
    check_family("optimizer_states.0.state.seq.0.weight.exp_avg", "seq.0.weight");
    check_family("optimizers.1.0.weight.exp_avg", "0.weight");
    check_family("opt_state.0.mu.params.w", "params.w");
    check_family("a.b/exp_avg_sq.pt", "a.b");
    check_family("optimizer.state.7.exp_avg", NULL);
    check_family("mu.x", "mu.x");
}

static void test_odd_names(void **state) {
    (void)state;
    static const char *const odd[] = {".",
                                      "..",
                                      "/",
                                      "exp_avg",
                                      "exp_avg.",
                                      ".exp_avg",
                                      "state",
                                      "state.",
                                      "state.0",
                                      "optimizer",
                                      "optimizer.state",
                                      "optimizer.state.",
                                      "pt",
                                      ".pt",
                                      "a.pt",
                                      "optimizer.0.1.2.3",
                                      "exp_avg..",
                                      "0.0.0.exp_avg",
                                      "state..exp_avg"};
    ckd_tensor_name tensors[sizeof(odd) / sizeof(odd[0])] = {{0}};
    ckd_tensor_role found[sizeof(odd) / sizeof(odd[0])];
    size_t count = sizeof(odd) / sizeof(odd[0]);
    for (size_t i = 0; i < count; i++) {
        ckd_role role = ckd_role_of(odd[i], CKD_F32);
        assert_in_range(role, CKD_ROLE_WEIGHT, CKD_ROLE_OTHER);
        tensors[i] = (ckd_tensor_name){.name = odd[i], .dtype = CKD_F32};
    }
    assert_int_equal(ckd_roles_find(found, tensors, count, NULL, 0, NULL), CKD_OK);
    char longest[CKD_NAME_MAX + 1];
    for (size_t period = 1; period < 20; period++) {
        for (size_t i = 0; i < CKD_NAME_MAX; i++) {
            longest[i] = i % period == 0 ? '.' : '7';
        }
        longest[CKD_NAME_MAX] = '\0';
        ckd_tensor_name t = {.name = longest, .dtype = CKD_F32, .role = CKD_ROLE_EXP_AVG};
        assert_int_equal(ckd_roles_find(found, &t, 1, NULL, 0, NULL), CKD_OK);
        assert_int_equal(found[0].role, CKD_ROLE_EXP_AVG);
        assert_null(found[0].weight);
    }
}

/* ---- all names of a checkpoint ---- */

typedef struct expected {
    const char *name;
    uint64_t rows;      /* rows of 16 elements; 0: a single number */
    ckd_role role;      /* the role to be found */
    const char *weight; /* the weight to be found, or NULL */
    ckd_role given;     /* role that the caller gives, or AUTO */
    bool in_doubt;
} expected;
#define IS(name, rows, role) \
    { name, rows, role, NULL, CKD_ROLE_AUTO, false }
#define OF(name, rows, role, weight) \
    { name, rows, role, weight, CKD_ROLE_AUTO, false }
#define GIVEN(name, rows, role, weight) \
    { name, rows, role, weight, role, false }
#define DOUBT(name, rows) \
    { name, rows, O, NULL, CKD_ROLE_AUTO, true }

static void check_orders(const expected *all, size_t count, const ckd_parameter_order *orders,
                         size_t order_count) {
    ckd_tensor_name *tensors = calloc(count, sizeof(*tensors));
    ckd_tensor_role *found = calloc(count, sizeof(*found));
    uint64_t(*shapes)[2] = calloc(count, sizeof(*shapes));
    for (size_t i = 0; i < count; i++) {
        shapes[i][0] = all[i].rows;
        shapes[i][1] = 16;
        tensors[i] = (ckd_tensor_name){.name = all[i].name,
                                       .dtype = CKD_F32,
                                       .role = all[i].given,
                                       .ndim = all[i].rows ? 2 : 0,
                                       .shape = shapes[i]};
    }
    ckd_error err;
    assert_int_equal(ckd_roles_find(found, tensors, count, orders, order_count, &err), CKD_OK);
    for (size_t i = 0; i < count; i++) {
        const char *weight = found[i].weight ? found[i].weight : "-",
                   *wanted = all[i].weight ? all[i].weight : "-";
        if (found[i].role != all[i].role || strcmp(weight, wanted) != 0 ||
            found[i].in_doubt != all[i].in_doubt) {
            fail_msg("%s: %s of %s%s; not %s of %s%s", all[i].name, ckd_role_name(found[i].role), weight,
                     found[i].in_doubt ? ", in doubt" : "", ckd_role_name(all[i].role), wanted,
                     all[i].in_doubt ? ", in doubt" : "");
        }
    }
    free(tensors);
    free(found);
    free(shapes);
}

static void check(const expected *all, size_t count) {
    check_orders(all, count, NULL, 0);
}
#define CHECK(...) \
    check((const expected[]){__VA_ARGS__}, sizeof((const expected[]){__VA_ARGS__}) / sizeof(expected))

static void test_ckptdelta_names(void **state) {
    (void)state;
    CHECK(IS("w", 4, W), OF("master.w", 4, MA, "w"), OF("exp_avg.w", 4, M, "w"),
          OF("exp_avg_sq.w", 4, V, "w"), OF("max_exp_avg_sq.w", 4, V, "w"), IS("step.w", 0, W));
    CHECK(OF("master.group0", 4, MA, "master.group0"), OF("exp_avg.group0", 4, M, "master.group0"),
          OF("exp_avg_sq.group0", 4, V, "master.group0"));
}

static void test_dcp(void **state) {
    (void)state;
    CHECK(IS("model.emb.weight", 4, W), IS("model.seq.0.weight", 5, W), IS("model.0.weight", 6, W),
          OF("optimizer.state.emb.weight.exp_avg", 4, M, "model.emb.weight"),
          OF("optimizer.state.emb.weight.exp_avg_sq", 4, V, "model.emb.weight"),
          OF("optimizer.state.emb.weight.max_exp_avg_sq", 4, V, "model.emb.weight"),
          IS("optimizer.state.emb.weight.step", 0, O),
          OF("optimizer.state.seq.0.weight.exp_avg", 5, M, "model.seq.0.weight"),
          OF("optimizer.state.0.weight.exp_avg", 6, M, "model.0.weight"));
    /* torchtitan: the model's names have no prefix */
    CHECK(IS("layers.0.wq.weight", 4, W),
          OF("optimizer.state.layers.0.wq.weight.exp_avg", 4, M, "layers.0.wq.weight"));
    /* A Hugging Face model contains a module named model. */
    CHECK(IS("model.model.emb.weight", 4, W), IS("model.lm_head.weight", 4, W),
          OF("optim.state.model.emb.weight.exp_avg_sq", 4, V, "model.model.emb.weight"),
          OF("optim.lm_head.weight.exp_avg", 4, M, "model.lm_head.weight"));
}

static void test_wrapped(void **state) {
    (void)state;
    CHECK(IS("module.layers.0.weight", 4, W), OF("exp_avg.layers.0.weight", 4, M, "module.layers.0.weight"));
    CHECK(IS("layers.0.weight", 4, W),
          OF("state._orig_mod.layers.0._checkpoint_wrapped_module.weight.exp_avg", 4, M, "layers.0.weight"),
          OF("state._fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight.exp_avg_sq", 4, V,
             "layers.0.weight"));
    CHECK(IS("state_dict._orig_mod.w", 4, W),
          OF("optimizer_states.0.state.w.exp_avg", 4, M, "state_dict._orig_mod.w"));
    /* Two weights match, so none is chosen. */
    CHECK(IS("module.w", 4, W), IS("_orig_mod.w", 4, W), DOUBT("state.w.exp_avg", 4));
    /* The exact name is preferred. */
    CHECK(IS("module.w", 4, W), IS("w", 4, W), OF("state.w.exp_avg", 4, M, "w"));
}

static void test_numbers(void **state) {
    (void)state;
    static const expected all[] = {IS("model.a", 4, W),
                                   IS("model.b", 5, W),
                                   OF("optimizer.state.0.exp_avg", 5, M, "model.b"),
                                   OF("optimizer.state.0.exp_avg_sq", 5, V, "model.b"),
                                   IS("optimizer.state.0.step", 0, O),
                                   OF("optimizer.state.1.momentum_buffer", 4, M, "model.a"),
                                   DOUBT("optimizer.state.2.exp_avg", 4),
                                   DOUBT("other.state.0.exp_avg", 5)};
    const char *order[] = {"b", "a", NULL};
    ckd_parameter_order orders[] = {{"optimizer.", order, 3}};
    check_orders(all, sizeof(all) / sizeof(all[0]), orders, 1);
    /* Without the order they are in doubt and stay exact. So does a moment whose shape differs from the weight's. */
    CHECK(IS("a", 4, W), DOUBT("state.0.exp_avg", 4), DOUBT("state.0.exp_avg_sq", 4),
          IS("state.0.step", 0, O));
    static const expected other[] = {IS("a", 4, W), DOUBT("state.0.exp_avg", 5)};
    const char *only[] = {"a"};
    ckd_parameter_order one[] = {{"", only, 1}};
    check_orders(other, 2, one, 1);
}

static void test_deepspeed(void **state) {
    (void)state;
    CHECK(IS("layers.0.weight", 4, W), OF("layers.0.weight/fp32.pt", 4, MA, "layers.0.weight"),
          OF("layers.0.weight/exp_avg.pt", 4, M, "layers.0.weight"),
          OF("layers.0.weight/exp_avg_sq.pt", 4, V, "layers.0.weight"), IS("layers.0.weight/step.pt", 0, W));
    /* Only the folder of the universal format. */
    CHECK(OF("zero.a.fp32", 4, MA, "zero.a.fp32"), OF("zero.a.exp_avg", 4, M, "zero.a.fp32"),
          OF("zero.a.exp_avg_sq", 4, V, "zero.a.fp32"));
    CHECK(IS("module.a", 4, W), DOUBT("optimizer_state_dict.base_optimizer_state.state.0.exp_avg", 9),
          DOUBT("optimizer_state_dict.single_partition_of_fp32_groups.0", 9));
}

static void test_megatron(void **state) {
    (void)state;
    CHECK(IS("model.decoder.w", 4, W),
          OF("optimizer.state.fp32_param.model.decoder.w", 4, MA, "model.decoder.w"),
          OF("optimizer.state.exp_avg.model.decoder.w", 4, M, "model.decoder.w"),
          OF("optimizer.state.exp_avg_sq.model.decoder.w", 4, V, "model.decoder.w"));
    CHECK(IS("decoder.w", 4, W), OF("chained_0.optimizer.state.exp_avg.decoder.w", 4, M, "decoder.w"),
          DOUBT("chained_1.optimizer.state.exp_avg.experts.w", 4));
}

static void test_optax(void **state) {
    (void)state;
    CHECK(IS("params.Dense_0.kernel", 4, W),
          OF("opt_state.0.mu.Dense_0.kernel", 4, M, "params.Dense_0.kernel"),
          OF("opt_state.0.nu.Dense_0.kernel", 4, V, "params.Dense_0.kernel"), IS("opt_state.0.count", 0, O));
    CHECK(IS("params.w", 4, W), OF("mu.params.w", 4, M, "params.w"), OF("nu.params.w", 4, V, "params.w"));
    CHECK(DOUBT("encoder.mu.weight", 4), IS("encoder.weight", 5, W));
}

static void test_in_doubt(void **state) {
    (void)state;
    /* A different shape, no such weight, an unknown slot, two tensors for one place. */
    CHECK(IS("w", 4, W), DOUBT("exp_avg.w", 5), DOUBT("exp_avg_sq.x", 4), DOUBT("optimizer.state.w.sum", 4),
          DOUBT("master.y", 4), IS("optimizer.state.w.row_var", 4, O), IS("optimizer.state.w.lr", 0, O));
    CHECK(IS("w", 4, W), DOUBT("optimizers.0.w.exp_avg", 4), DOUBT("optimizers.1.w.exp_avg", 4));
    /* Short names next to their weight, and a layer of such a name without one. */
    CHECK(IS("a.w", 4, W), DOUBT("m.a.w", 4), DOUBT("a.w.v", 4), IS("v.weight", 4, W),
          IS("attention.v", 4, W));
}

static void test_given(void **state) {
    (void)state;
    CHECK(IS("w", 4, W), GIVEN("m.w", 4, M, "w"), GIVEN("w.second", 4, V, "w"),
          GIVEN("exp_avg.y", 4, M, NULL), GIVEN("optimizer.z", 4, W, NULL),
          DOUBT("optimizer.state.z.exp_avg", 4), GIVEN("encoder.mu.weight", 7, W, NULL),
          OF("exp_avg.encoder.mu.weight", 7, M, "encoder.mu.weight"));
}

static void test_several_regions(void **state) {
    (void)state;
    CHECK(IS("w", 4, W), IS("w", 4, W), OF("exp_avg.w", 4, M, "w"), OF("exp_avg.w", 4, M, "w"));
    CHECK(IS("w", 4, W), OF("exp_avg.w", 4, M, "w"), IS("w", 4, W), OF("exp_avg.w", 4, M, "w"),
          IS("w", 4, W));
    CHECK(OF("zero.a.exp_avg", 4, M, "zero.a.fp32"), OF("zero.a.fp32", 4, MA, "zero.a.fp32"),
          OF("zero.a.exp_avg", 4, M, "zero.a.fp32"), OF("zero.a.fp32", 4, MA, "zero.a.fp32"),
          DOUBT("zero.b.fp32", 4), DOUBT("zero.b.fp32", 4));
}

static void test_no_name(void **state) {
    (void)state;
    ckd_tensor_name tensors[2] = {{.name = "w", .dtype = CKD_F32}, {.name = "", .dtype = CKD_F32}};
    ckd_tensor_role found[2];
    ckd_error err;
    assert_int_equal(ckd_roles_find(found, tensors, 2, NULL, 0, &err), CKD_E_INVALID);
    assert_int_equal(found[0].role, CKD_ROLE_AUTO);
    assert_int_equal(ckd_roles_find(found, tensors, 0, NULL, 0, &err), CKD_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_name),
        cmocka_unit_test(test_parameter_of_a_name),
        cmocka_unit_test(test_odd_names),
        cmocka_unit_test(test_ckptdelta_names),
        cmocka_unit_test(test_dcp),
        cmocka_unit_test(test_wrapped),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_deepspeed),
        cmocka_unit_test(test_megatron),
        cmocka_unit_test(test_optax),
        cmocka_unit_test(test_in_doubt),
        cmocka_unit_test(test_given),
        cmocka_unit_test(test_several_regions),
        cmocka_unit_test(test_no_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
