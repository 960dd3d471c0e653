"""The `megatron` engine on Huawei's NPUs: Megatron-Core with MindSpeed's patches. It was never run.

In reading order: `adaptor`, what it needs and how the patches are applied; `engine`. Both were written from the sources
of MindSpeed (https://gitcode.com/Ascend/MindSpeed), branch core_r0.16.0 at e4772499 of July 2026. That branch is made
for megatron-core 0.16.0, torch 2.7.1, Python 3.10 and CANN 9.0.0.
"""
