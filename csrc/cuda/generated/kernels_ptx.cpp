// Made by csrc/cuda/kernels/make.sh from copy_kernels.cu. Do not edit.
#include "cuda/kernels/copy_kernels.h"

namespace kvferry {

const char kCopyKernels[] = R"ptx(
.version 7.7
.target sm_75
.address_size 64
.shared .align 8 .u64 _ZZN46_INTERNAL_00000000_15_copy_kernels_cu_6d2194a748_GLOBAL__N__00000000_15_copy_kernels_cu_6d2194a711add_to_cellERKN7kvferry7SumIntoEmE5total;
.visible .entry copy_pages_16(
	.param .align 8 .b8 copy_pages_16_param_0[3904]
)
.maxntid 1024, 1, 1
.minnctapersm 2
{
	.reg .pred 	%p<15>;
	.reg .b32 	%r<168>;
	.reg .b64 	%rd<61>;
	mov.b64 	%rd13, copy_pages_16_param_0;
	ld.param.u32 	%r1, [copy_pages_16_param_0+44];
	add.s32 	%r56, %r1, 2047;
	shr.u32 	%r57, %r56, 11;
	ld.param.u32 	%r2, [copy_pages_16_param_0+52];
	mul.lo.s32 	%r58, %r57, %r2;
	mov.u32 	%r59, %ntid.x;
	shr.u32 	%r60, %r59, 5;
	ld.param.u32 	%r3, [copy_pages_16_param_0+56];
	mul.wide.u32 	%rd14, %r58, %r3;
	mov.u32 	%r61, %ctaid.x;
	mov.u32 	%r62, %tid.x;
	shr.u32 	%r63, %r62, 5;
	mad.lo.s32 	%r64, %r60, %r61, %r63;
	cvt.u64.u32 	%rd58, %r64;
	setp.le.u64 	%p1, %rd14, %rd58;
	@%p1 bra 	$L__BB0_25;
	cvt.u64.u32 	%rd16, %r58;
$L__BB0_2:
	and.b64  	%rd15, %rd58, -4294967296;
	setp.eq.s64 	%p2, %rd15, 0;
	@%p2 bra 	$L__BB0_4;
	div.u64 	%rd59, %rd58, %rd16;
	mul.lo.s64 	%rd17, %rd59, %rd16;
	sub.s64 	%rd60, %rd58, %rd17;
	bra.uni 	$L__BB0_5;
$L__BB0_4:
	cvt.u32.u64 	%r71, %rd58;
	div.u32 	%r72, %r71, %r58;
	mul.lo.s32 	%r73, %r72, %r58;
	sub.s32 	%r74, %r71, %r73;
	cvt.u64.u32 	%rd59, %r72;
	cvt.u64.u32 	%rd60, %r74;
$L__BB0_5:
	cvt.u32.u64 	%r77, %rd60;
	div.u32 	%r78, %r77, %r57;
	ld.param.u32 	%r79, [%rd13+48];
	add.s32 	%r80, %r78, %r79;
	mul.lo.s32 	%r81, %r78, %r57;
	sub.s32 	%r82, %r77, %r81;
	shl.b32 	%r83, %r82, 11;
	ld.param.v2.u32 	{%r84, %r85}, [%rd13+40];
	div.u32 	%r88, %r80, %r84;
	ld.param.u64 	%rd19, [%rd13];
	cvta.to.global.u64 	%rd20, %rd19;
	mul.wide.u32 	%rd21, %r88, 8;
	add.s64 	%rd22, %rd20, %rd21;
	shl.b64 	%rd23, %rd59, 2;
	and.b64  	%rd24, %rd23, 17179869180;
	add.s64 	%rd25, %rd13, %rd24;
	ld.param.u32 	%rd26, [%rd25+64];
	ld.param.u64 	%rd27, [%rd13+8];
	cvta.to.global.u64 	%rd28, %rd27;
	add.s64 	%rd29, %rd28, %rd21;
	ld.global.u64 	%rd30, [%rd29];
	mul.lo.s64 	%rd31, %rd30, %rd26;
	ld.param.u32 	%r89, [%rd13+40];
	rem.u32 	%r90, %r80, %r89;
	cvt.u64.u32 	%rd32, %r90;
	ld.param.u64 	%rd33, [%rd13+16];
	mul.lo.s64 	%rd34, %rd33, %rd32;
	ld.global.u64 	%rd35, [%rd22];
	add.s64 	%rd36, %rd31, %rd35;
	add.s64 	%rd37, %rd36, %rd34;
	ld.param.u32 	%rd38, [%rd25+1984];
	ld.param.u64 	%rd39, [%rd13+32];
	mul.lo.s64 	%rd40, %rd39, %rd38;
	ld.param.u64 	%rd41, [%rd13+24];
	add.s64 	%rd42, %rd40, %rd41;
	mul.wide.u32 	%rd43, %r85, %r80;
	add.s64 	%rd44, %rd42, %rd43;
	ld.param.u32 	%r91, [%rd13+60];
	setp.eq.s32 	%p3, %r91, 0;
	selp.b64 	%rd9, %rd44, %rd37, %p3;
	selp.b64 	%rd10, %rd37, %rd44, %p3;
	add.s32 	%r92, %r83, 2048;
	ld.param.u32 	%r93, [%rd13+44];
	min.u32 	%r4, %r92, %r93;
	shl.b32 	%r95, %r62, 4;
	and.b32  	%r96, %r95, 496;
	or.b32  	%r151, %r83, %r96;
	setp.ge.u32 	%p4, %r151, %r4;
	@%p4 bra 	$L__BB0_24;
$L__BB0_7:
	cvt.u64.u32 	%rd11, %r151;
	setp.ge.u32 	%p5, %r151, %r4;
	@%p5 bra 	$L__BB0_9;
	add.s64 	%rd45, %rd9, %rd11;
	ld.global.cs.v4.u32 {%r155,%r154,%r153,%r152}, [%rd45];
$L__BB0_9:
	cvt.u32.u64 	%r102, %rd11;
	add.s32 	%r103, %r102, 512;
	setp.ge.u32 	%p6, %r103, %r4;
	@%p6 bra 	$L__BB0_11;
	add.s64 	%rd47, %rd9, %rd11;
	add.s64 	%rd46, %rd47, 512;
	ld.global.cs.v4.u32 {%r159,%r158,%r157,%r156}, [%rd46];
$L__BB0_11:
	add.s32 	%r109, %r102, 1024;
	setp.ge.u32 	%p7, %r109, %r4;
	@%p7 bra 	$L__BB0_13;
	add.s64 	%rd49, %rd9, %rd11;
	add.s64 	%rd48, %rd49, 1024;
	ld.global.cs.v4.u32 {%r163,%r162,%r161,%r160}, [%rd48];
$L__BB0_13:
	add.s32 	%r115, %r102, 1536;
	setp.ge.u32 	%p8, %r115, %r4;
	@%p8 bra 	$L__BB0_15;
	add.s64 	%rd51, %rd9, %rd11;
	add.s64 	%rd50, %rd51, 1536;
	ld.global.cs.v4.u32 {%r167,%r166,%r165,%r164}, [%rd50];
$L__BB0_15:
	setp.ge.u32 	%p9, %r102, %r4;
	@%p9 bra 	$L__BB0_17;
	add.s64 	%rd52, %rd10, %rd11;
	st.v4.u32 	[%rd52], {%r155, %r154, %r153, %r152};
$L__BB0_17:
	@%p6 bra 	$L__BB0_19;
	add.s64 	%rd53, %rd10, %rd11;
	st.v4.u32 	[%rd53+512], {%r159, %r158, %r157, %r156};
$L__BB0_19:
	@%p7 bra 	$L__BB0_21;
	add.s64 	%rd54, %rd10, %rd11;
	st.v4.u32 	[%rd54+1024], {%r163, %r162, %r161, %r160};
$L__BB0_21:
	@%p8 bra 	$L__BB0_23;
	add.s64 	%rd55, %rd10, %rd11;
	st.v4.u32 	[%rd55+1536], {%r167, %r166, %r165, %r164};
$L__BB0_23:
	add.s32 	%r151, %r102, 2048;
	setp.lt.u32 	%p13, %r151, %r4;
	@%p13 bra 	$L__BB0_7;
$L__BB0_24:
	mov.u32 	%r130, %nctaid.x;
	mul.lo.s32 	%r131, %r60, %r130;
	cvt.u64.u32 	%rd56, %r131;
	add.s64 	%rd58, %rd58, %rd56;
	setp.lt.u64 	%p14, %rd58, %rd14;
	@%p14 bra 	$L__BB0_2;
$L__BB0_25:
	ret;
}
.visible .entry copy_pages_4(
	.param .align 8 .b8 copy_pages_4_param_0[3904]
)
.maxntid 1024, 1, 1
.minnctapersm 2
{
	.reg .pred 	%p<15>;
	.reg .b32 	%r<96>;
	.reg .b64 	%rd<61>;
	mov.b64 	%rd13, copy_pages_4_param_0;
	ld.param.u32 	%r1, [copy_pages_4_param_0+44];
	add.s32 	%r20, %r1, 2047;
	shr.u32 	%r21, %r20, 11;
	ld.param.u32 	%r2, [copy_pages_4_param_0+52];
	mul.lo.s32 	%r22, %r21, %r2;
	mov.u32 	%r23, %ntid.x;
	shr.u32 	%r24, %r23, 5;
	ld.param.u32 	%r3, [copy_pages_4_param_0+56];
	mul.wide.u32 	%rd14, %r22, %r3;
	mov.u32 	%r25, %ctaid.x;
	mov.u32 	%r26, %tid.x;
	shr.u32 	%r27, %r26, 5;
	mad.lo.s32 	%r28, %r24, %r25, %r27;
	cvt.u64.u32 	%rd58, %r28;
	setp.le.u64 	%p1, %rd14, %rd58;
	@%p1 bra 	$L__BB1_25;
	cvt.u64.u32 	%rd16, %r22;
$L__BB1_2:
	and.b64  	%rd15, %rd58, -4294967296;
	setp.eq.s64 	%p2, %rd15, 0;
	@%p2 bra 	$L__BB1_4;
	div.u64 	%rd59, %rd58, %rd16;
	mul.lo.s64 	%rd17, %rd59, %rd16;
	sub.s64 	%rd60, %rd58, %rd17;
	bra.uni 	$L__BB1_5;
$L__BB1_4:
	cvt.u32.u64 	%r35, %rd58;
	div.u32 	%r36, %r35, %r22;
	mul.lo.s32 	%r37, %r36, %r22;
	sub.s32 	%r38, %r35, %r37;
	cvt.u64.u32 	%rd59, %r36;
	cvt.u64.u32 	%rd60, %r38;
$L__BB1_5:
	cvt.u32.u64 	%r41, %rd60;
	div.u32 	%r42, %r41, %r21;
	ld.param.u32 	%r43, [%rd13+48];
	add.s32 	%r44, %r42, %r43;
	mul.lo.s32 	%r45, %r42, %r21;
	sub.s32 	%r46, %r41, %r45;
	shl.b32 	%r47, %r46, 11;
	ld.param.v2.u32 	{%r48, %r49}, [%rd13+40];
	div.u32 	%r52, %r44, %r48;
	ld.param.u64 	%rd19, [%rd13];
	cvta.to.global.u64 	%rd20, %rd19;
	mul.wide.u32 	%rd21, %r52, 8;
	add.s64 	%rd22, %rd20, %rd21;
	shl.b64 	%rd23, %rd59, 2;
	and.b64  	%rd24, %rd23, 17179869180;
	add.s64 	%rd25, %rd13, %rd24;
	ld.param.u32 	%rd26, [%rd25+64];
	ld.param.u64 	%rd27, [%rd13+8];
	cvta.to.global.u64 	%rd28, %rd27;
	add.s64 	%rd29, %rd28, %rd21;
	ld.global.u64 	%rd30, [%rd29];
	mul.lo.s64 	%rd31, %rd30, %rd26;
	ld.param.u32 	%r53, [%rd13+40];
	rem.u32 	%r54, %r44, %r53;
	cvt.u64.u32 	%rd32, %r54;
	ld.param.u64 	%rd33, [%rd13+16];
	mul.lo.s64 	%rd34, %rd33, %rd32;
	ld.global.u64 	%rd35, [%rd22];
	add.s64 	%rd36, %rd31, %rd35;
	add.s64 	%rd37, %rd36, %rd34;
	ld.param.u32 	%rd38, [%rd25+1984];
	ld.param.u64 	%rd39, [%rd13+32];
	mul.lo.s64 	%rd40, %rd39, %rd38;
	ld.param.u64 	%rd41, [%rd13+24];
	add.s64 	%rd42, %rd40, %rd41;
	mul.wide.u32 	%rd43, %r49, %r44;
	add.s64 	%rd44, %rd42, %rd43;
	ld.param.u32 	%r55, [%rd13+60];
	setp.eq.s32 	%p3, %r55, 0;
	selp.b64 	%rd9, %rd44, %rd37, %p3;
	selp.b64 	%rd10, %rd37, %rd44, %p3;
	add.s32 	%r56, %r47, 2048;
	ld.param.u32 	%r57, [%rd13+44];
	min.u32 	%r4, %r56, %r57;
	shl.b32 	%r59, %r26, 2;
	and.b32  	%r60, %r59, 124;
	or.b32  	%r91, %r47, %r60;
	setp.ge.u32 	%p4, %r91, %r4;
	@%p4 bra 	$L__BB1_24;
$L__BB1_7:
	cvt.u64.u32 	%rd11, %r91;
	setp.ge.u32 	%p5, %r91, %r4;
	@%p5 bra 	$L__BB1_9;
	add.s64 	%rd45, %rd9, %rd11;
	ld.global.cs.u32 %r92, [%rd45];
$L__BB1_9:
	cvt.u32.u64 	%r63, %rd11;
	add.s32 	%r64, %r63, 128;
	setp.ge.u32 	%p6, %r64, %r4;
	@%p6 bra 	$L__BB1_11;
	add.s64 	%rd47, %rd9, %rd11;
	add.s64 	%rd46, %rd47, 128;
	ld.global.cs.u32 %r93, [%rd46];
$L__BB1_11:
	add.s32 	%r67, %r63, 256;
	setp.ge.u32 	%p7, %r67, %r4;
	@%p7 bra 	$L__BB1_13;
	add.s64 	%rd49, %rd9, %rd11;
	add.s64 	%rd48, %rd49, 256;
	ld.global.cs.u32 %r94, [%rd48];
$L__BB1_13:
	add.s32 	%r70, %r63, 384;
	setp.ge.u32 	%p8, %r70, %r4;
	@%p8 bra 	$L__BB1_15;
	add.s64 	%rd51, %rd9, %rd11;
	add.s64 	%rd50, %rd51, 384;
	ld.global.cs.u32 %r95, [%rd50];
$L__BB1_15:
	setp.ge.u32 	%p9, %r63, %r4;
	@%p9 bra 	$L__BB1_17;
	add.s64 	%rd52, %rd10, %rd11;
	st.u32 	[%rd52], %r92;
$L__BB1_17:
	@%p6 bra 	$L__BB1_19;
	add.s64 	%rd53, %rd10, %rd11;
	st.u32 	[%rd53+128], %r93;
$L__BB1_19:
	@%p7 bra 	$L__BB1_21;
	add.s64 	%rd54, %rd10, %rd11;
	st.u32 	[%rd54+256], %r94;
$L__BB1_21:
	@%p8 bra 	$L__BB1_23;
	add.s64 	%rd55, %rd10, %rd11;
	st.u32 	[%rd55+384], %r95;
$L__BB1_23:
	add.s32 	%r91, %r63, 512;
	setp.lt.u32 	%p13, %r91, %r4;
	@%p13 bra 	$L__BB1_7;
$L__BB1_24:
	mov.u32 	%r82, %nctaid.x;
	mul.lo.s32 	%r83, %r24, %r82;
	cvt.u64.u32 	%rd56, %r83;
	add.s64 	%rd58, %rd58, %rd56;
	setp.lt.u64 	%p14, %rd58, %rd14;
	@%p14 bra 	$L__BB1_2;
$L__BB1_25:
	ret;
}
.visible .entry copy_pages_1(
	.param .align 8 .b8 copy_pages_1_param_0[3904]
)
.maxntid 1024, 1, 1
.minnctapersm 2
{
	.reg .pred 	%p<15>;
	.reg .b16 	%rs<38>;
	.reg .b32 	%r<74>;
	.reg .b64 	%rd<61>;
	mov.b64 	%rd13, copy_pages_1_param_0;
	ld.param.u32 	%r1, [copy_pages_1_param_0+44];
	add.s32 	%r8, %r1, 2047;
	shr.u32 	%r9, %r8, 11;
	ld.param.u32 	%r2, [copy_pages_1_param_0+52];
	mul.lo.s32 	%r10, %r9, %r2;
	mov.u32 	%r11, %ntid.x;
	shr.u32 	%r12, %r11, 5;
	ld.param.u32 	%r3, [copy_pages_1_param_0+56];
	mul.wide.u32 	%rd14, %r10, %r3;
	mov.u32 	%r13, %ctaid.x;
	mov.u32 	%r14, %tid.x;
	shr.u32 	%r15, %r14, 5;
	mad.lo.s32 	%r16, %r12, %r13, %r15;
	cvt.u64.u32 	%rd58, %r16;
	setp.le.u64 	%p1, %rd14, %rd58;
	@%p1 bra 	$L__BB2_24;
	cvt.u64.u32 	%rd16, %r10;
$L__BB2_2:
	and.b64  	%rd15, %rd58, -4294967296;
	setp.eq.s64 	%p2, %rd15, 0;
	@%p2 bra 	$L__BB2_4;
	div.u64 	%rd59, %rd58, %rd16;
	mul.lo.s64 	%rd17, %rd59, %rd16;
	sub.s64 	%rd60, %rd58, %rd17;
	bra.uni 	$L__BB2_5;
$L__BB2_4:
	cvt.u32.u64 	%r23, %rd58;
	div.u32 	%r24, %r23, %r10;
	mul.lo.s32 	%r25, %r24, %r10;
	sub.s32 	%r26, %r23, %r25;
	cvt.u64.u32 	%rd59, %r24;
	cvt.u64.u32 	%rd60, %r26;
$L__BB2_5:
	cvt.u32.u64 	%r29, %rd60;
	div.u32 	%r30, %r29, %r9;
	ld.param.u32 	%r31, [%rd13+48];
	add.s32 	%r32, %r30, %r31;
	mul.lo.s32 	%r33, %r30, %r9;
	sub.s32 	%r34, %r29, %r33;
	shl.b32 	%r35, %r34, 11;
	ld.param.v2.u32 	{%r36, %r37}, [%rd13+40];
	div.u32 	%r40, %r32, %r36;
	ld.param.u64 	%rd19, [%rd13];
	cvta.to.global.u64 	%rd20, %rd19;
	mul.wide.u32 	%rd21, %r40, 8;
	add.s64 	%rd22, %rd20, %rd21;
	shl.b64 	%rd23, %rd59, 2;
	and.b64  	%rd24, %rd23, 17179869180;
	add.s64 	%rd25, %rd13, %rd24;
	ld.param.u32 	%rd26, [%rd25+64];
	ld.param.u64 	%rd27, [%rd13+8];
	cvta.to.global.u64 	%rd28, %rd27;
	add.s64 	%rd29, %rd28, %rd21;
	ld.global.u64 	%rd30, [%rd29];
	mul.lo.s64 	%rd31, %rd30, %rd26;
	ld.param.u32 	%r41, [%rd13+40];
	rem.u32 	%r42, %r32, %r41;
	cvt.u64.u32 	%rd32, %r42;
	ld.param.u64 	%rd33, [%rd13+16];
	mul.lo.s64 	%rd34, %rd33, %rd32;
	ld.global.u64 	%rd35, [%rd22];
	add.s64 	%rd36, %rd31, %rd35;
	add.s64 	%rd37, %rd36, %rd34;
	ld.param.u32 	%rd38, [%rd25+1984];
	ld.param.u64 	%rd39, [%rd13+32];
	mul.lo.s64 	%rd40, %rd39, %rd38;
	ld.param.u64 	%rd41, [%rd13+24];
	add.s64 	%rd42, %rd40, %rd41;
	mul.wide.u32 	%rd43, %r37, %r32;
	add.s64 	%rd44, %rd42, %rd43;
	ld.param.u32 	%r43, [%rd13+60];
	setp.eq.s32 	%p3, %r43, 0;
	selp.b64 	%rd9, %rd44, %rd37, %p3;
	selp.b64 	%rd10, %rd37, %rd44, %p3;
	add.s32 	%r44, %r35, 2048;
	ld.param.u32 	%r45, [%rd13+44];
	min.u32 	%r4, %r44, %r45;
	and.b32  	%r47, %r14, 31;
	bfi.b32 	%r73, %r34, %r47, 11, 21;
	setp.ge.u32 	%p4, %r73, %r4;
	@%p4 bra 	$L__BB2_23;
$L__BB2_6:
	cvt.u64.u32 	%rd11, %r73;
	setp.ge.u32 	%p5, %r73, %r4;
	@%p5 bra 	$L__BB2_8;
	add.s64 	%rd45, %rd9, %rd11;
	ld.global.cs.u8 %r48, [%rd45];
	cvt.u16.u32 	%rs30, %r48;
$L__BB2_8:
	cvt.u32.u64 	%r49, %rd11;
	add.s32 	%r50, %r49, 32;
	setp.ge.u32 	%p6, %r50, %r4;
	@%p6 bra 	$L__BB2_10;
	add.s64 	%rd47, %rd9, %rd11;
	add.s64 	%rd46, %rd47, 32;
	ld.global.cs.u8 %r51, [%rd46];
	cvt.u16.u32 	%rs31, %r51;
$L__BB2_10:
	add.s32 	%r53, %r49, 64;
	setp.ge.u32 	%p7, %r53, %r4;
	@%p7 bra 	$L__BB2_12;
	add.s64 	%rd49, %rd9, %rd11;
	add.s64 	%rd48, %rd49, 64;
	ld.global.cs.u8 %r54, [%rd48];
	cvt.u16.u32 	%rs32, %r54;
$L__BB2_12:
	add.s32 	%r56, %r49, 96;
	setp.ge.u32 	%p8, %r56, %r4;
	@%p8 bra 	$L__BB2_14;
	add.s64 	%rd51, %rd9, %rd11;
	add.s64 	%rd50, %rd51, 96;
	ld.global.cs.u8 %r57, [%rd50];
	cvt.u16.u32 	%rs33, %r57;
$L__BB2_14:
	setp.ge.u32 	%p9, %r49, %r4;
	@%p9 bra 	$L__BB2_16;
	add.s64 	%rd52, %rd10, %rd11;
	st.u8 	[%rd52], %rs30;
$L__BB2_16:
	@%p6 bra 	$L__BB2_18;
	add.s64 	%rd53, %rd10, %rd11;
	st.u8 	[%rd53+32], %rs31;
$L__BB2_18:
	@%p7 bra 	$L__BB2_20;
	add.s64 	%rd54, %rd10, %rd11;
	st.u8 	[%rd54+64], %rs32;
$L__BB2_20:
	@%p8 bra 	$L__BB2_22;
	add.s64 	%rd55, %rd10, %rd11;
	st.u8 	[%rd55+96], %rs33;
$L__BB2_22:
	add.s32 	%r73, %r49, 128;
	setp.lt.u32 	%p13, %r73, %r4;
	@%p13 bra 	$L__BB2_6;
$L__BB2_23:
	mov.u32 	%r68, %nctaid.x;
	mul.lo.s32 	%r69, %r12, %r68;
	cvt.u64.u32 	%rd56, %r69;
	add.s64 	%rd58, %rd58, %rd56;
	setp.lt.u64 	%p14, %rd58, %rd14;
	@%p14 bra 	$L__BB2_2;
$L__BB2_24:
	ret;
}
.visible .entry copy_list_16(
	.param .align 8 .b8 copy_list_16_param_0[4088]
)
.maxntid 1024, 1, 1
.minnctapersm 2
{
	.reg .pred 	%p<13>;
	.reg .b32 	%r<175>;
	.reg .b64 	%rd<35>;
	mov.b64 	%rd6, copy_list_16_param_0;
	mov.u32 	%r42, %ntid.x;
	shr.u32 	%r43, %r42, 5;
	mov.u32 	%r44, %ctaid.x;
	mov.u32 	%r45, %tid.x;
	shr.u32 	%r46, %r45, 5;
	mad.lo.s32 	%r159, %r43, %r44, %r46;
	add.s64 	%rd1, %rd6, 4;
	ld.param.u32 	%r47, [copy_list_16_param_0+4];
	setp.ge.u32 	%p1, %r159, %r47;
	@%p1 bra 	$L__BB3_19;
	ld.param.v2.u32 	{%r48, %r49}, [%rd1+-4];
$L__BB3_2:
	mov.u32 	%r162, 0;
	setp.lt.u32 	%p2, %r48, 2;
	@%p2 bra 	$L__BB3_5;
	mov.u32 	%r162, 0;
	mov.u32 	%r160, %r48;
$L__BB3_4:
	add.s32 	%r52, %r160, %r162;
	shr.u32 	%r53, %r52, 1;
	mul.wide.u32 	%rd8, %r53, 4;
	add.s64 	%rd9, %rd6, %rd8;
	ld.param.u32 	%r54, [%rd9+8];
	setp.le.u32 	%p3, %r54, %r159;
	selp.b32 	%r162, %r53, %r162, %p3;
	selp.b32 	%r160, %r160, %r53, %p3;
	sub.s32 	%r55, %r160, %r162;
	setp.gt.u32 	%p4, %r55, 1;
	@%p4 bra 	$L__BB3_4;
$L__BB3_5:
	shl.b32 	%r57, %r45, 4;
	and.b32  	%r58, %r57, 496;
	mul.wide.u32 	%rd11, %r162, 4;
	add.s64 	%rd12, %rd6, %rd11;
	ld.param.u32 	%r11, [%rd12+8];
	sub.s32 	%r59, %r159, %r11;
	shl.b32 	%r60, %r59, 11;
	mul.wide.u32 	%rd13, %r162, 8;
	add.s64 	%rd14, %rd6, %rd13;
	ld.param.u64 	%rd3, [%rd14+2728];
	ld.param.u64 	%rd4, [%rd14+1368];
	ld.param.u32 	%r12, [%rd12+688];
	sub.s32 	%r61, %r12, %r60;
	min.u32 	%r62, %r61, 2048;
	setp.ge.u32 	%p5, %r58, %r62;
	@%p5 bra 	$L__BB3_18;
	or.b32  	%r73, %r58, %r60;
	cvt.u64.u32 	%rd5, %r73;
	add.s64 	%rd15, %rd3, %rd5;
	ld.global.cs.v4.u32 {%r63,%r64,%r65,%r66}, [%rd15];
	or.b32  	%r74, %r58, 512;
	setp.ge.u32 	%p6, %r74, %r62;
	@%p6 bra 	$L__BB3_8;
	add.s64 	%rd16, %rd15, 512;
	ld.global.cs.v4.u32 {%r166,%r165,%r164,%r163}, [%rd16];
$L__BB3_8:
	or.b32  	%r89, %r58, 1024;
	setp.ge.u32 	%p7, %r89, %r62;
	@%p7 bra 	$L__BB3_10;
	add.s64 	%rd18, %rd15, 1024;
	ld.global.cs.v4.u32 {%r170,%r169,%r168,%r167}, [%rd18];
$L__BB3_10:
	or.b32  	%r102, %r58, 1536;
	setp.ge.u32 	%p8, %r102, %r62;
	@%p8 bra 	$L__BB3_12;
	add.s64 	%rd20, %rd15, 1536;
	ld.global.cs.v4.u32 {%r171,%r172,%r173,%r174}, [%rd20];
$L__BB3_12:
	cvta.to.global.u64 	%rd24, %rd4;
	add.s64 	%rd25, %rd24, %rd5;
	st.global.v4.u32 	[%rd25], {%r63, %r64, %r65, %r66};
	@%p6 bra 	$L__BB3_14;
	st.global.v4.u32 	[%rd25+512], {%r166, %r165, %r164, %r163};
$L__BB3_14:
	@%p7 bra 	$L__BB3_16;
	st.global.v4.u32 	[%rd25+1024], {%r170, %r169, %r168, %r167};
$L__BB3_16:
	@%p8 bra 	$L__BB3_18;
	st.global.v4.u32 	[%rd25+1536], {%r171, %r172, %r173, %r174};
$L__BB3_18:
	mov.u32 	%r158, %nctaid.x;
	mad.lo.s32 	%r159, %r43, %r158, %r159;
	setp.lt.u32 	%p12, %r159, %r49;
	@%p12 bra 	$L__BB3_2;
$L__BB3_19:
	ret;
}
.visible .entry copy_list_4(
	.param .align 8 .b8 copy_list_4_param_0[4088]
)
.maxntid 1024, 1, 1
.minnctapersm 2
{
	.reg .pred 	%p<32>;
	.reg .b32 	%r<175>;
	.reg .b64 	%rd<52>;
	mov.b64 	%rd25, copy_list_4_param_0;
	mov.u32 	%r61, %ntid.x;
	shr.u32 	%r62, %r61, 5;
	mov.u32 	%r63, %ctaid.x;
	mov.u32 	%r64, %tid.x;
	shr.u32 	%r65, %r64, 5;
	mad.lo.s32 	%r151, %r62, %r63, %r65;
	add.s64 	%rd1, %rd25, 4;
	ld.param.u32 	%r66, [copy_list_4_param_0+4];
	setp.ge.u32 	%p1, %r151, %r66;
	@%p1 bra 	$L__BB4_55;
	ld.param.v2.u32 	{%r68, %r69}, [%rd1+-4];
	mov.u32 	%r67, 0;
	mov.u32 	%r150, %r67;
$L__BB4_2:
	setp.lt.u32 	%p2, %r68, 2;
	mov.u32 	%r154, %r67;
	@%p2 bra 	$L__BB4_5;
	mov.u32 	%r154, 0;
	mov.u32 	%r152, %r68;
$L__BB4_4:
	add.s32 	%r72, %r152, %r154;
	shr.u32 	%r73, %r72, 1;
	mul.wide.u32 	%rd27, %r73, 4;
	add.s64 	%rd28, %rd25, %rd27;
	ld.param.u32 	%r74, [%rd28+8];
	setp.le.u32 	%p3, %r74, %r151;
	selp.b32 	%r154, %r73, %r154, %p3;
	selp.b32 	%r152, %r152, %r73, %p3;
	sub.s32 	%r75, %r152, %r154;
	setp.gt.u32 	%p4, %r75, 1;
	@%p4 bra 	$L__BB4_4;
$L__BB4_5:
	mul.wide.u32 	%rd30, %r154, 4;
	add.s64 	%rd31, %rd25, %rd30;
	ld.param.u32 	%r12, [%rd31+8];
	sub.s32 	%r76, %r151, %r12;
	shl.b32 	%r77, %r76, 11;
	mul.wide.u32 	%rd32, %r154, 8;
	add.s64 	%rd33, %rd25, %rd32;
	ld.param.u64 	%rd3, [%rd33+2728];
	cvt.u64.u32 	%rd4, %r77;
	ld.param.u64 	%rd34, [%rd33+1368];
	cvta.to.global.u64 	%rd5, %rd34;
	ld.param.u32 	%r13, [%rd31+688];
	sub.s32 	%r78, %r13, %r77;
	min.u32 	%r14, %r78, 2048;
	shl.b32 	%r80, %r64, 2;
	and.b32  	%r162, %r80, 124;
	setp.ge.u32 	%p5, %r162, %r14;
	@%p5 bra 	$L__BB4_54;
	mov.u32 	%r85, %nctaid.x;
	mul.lo.s32 	%r86, %r62, %r85;
	shl.b32 	%r87, %r86, 11;
	mad.lo.s32 	%r91, %r62, %r63, %r65;
	shl.b32 	%r92, %r91, 11;
	mad.lo.s32 	%r93, %r87, %r150, %r92;
	add.s32 	%r94, %r93, -1;
	sub.s32 	%r95, %r94, %r13;
	shl.b32 	%r96, %r12, 11;
	sub.s32 	%r97, %r95, %r96;
	max.u32 	%r98, %r97, -2049;
	mov.u32 	%r100, -2;
	sub.s32 	%r101, %r100, %r162;
	sub.s32 	%r16, %r101, %r98;
	and.b32  	%r102, %r16, 512;
	setp.ne.s32 	%p6, %r102, 0;
	@%p6 bra 	$L__BB4_19;
	and.b32  	%r107, %r80, 124;
	cvt.u64.u32 	%rd36, %r107;
	add.s64 	%rd6, %rd36, %rd4;
	add.s64 	%rd35, %rd3, %rd6;
	ld.global.cs.u32 %r167, [%rd35];
	or.b32  	%r108, %r107, 128;
	setp.ge.u32 	%p7, %r108, %r14;
	@%p7 bra 	$L__BB4_9;
	add.s64 	%rd37, %rd35, 128;
	ld.global.cs.u32 %r168, [%rd37];
$L__BB4_9:
	or.b32  	%r114, %r107, 256;
	setp.ge.u32 	%p8, %r114, %r14;
	@%p8 bra 	$L__BB4_11;
	add.s64 	%rd38, %rd35, 256;
	ld.global.cs.u32 %r169, [%rd38];
$L__BB4_11:
	or.b32  	%r120, %r107, 384;
	setp.ge.u32 	%p9, %r120, %r14;
	@%p9 bra 	$L__BB4_13;
	add.s64 	%rd39, %rd35, 384;
	ld.global.cs.u32 %r170, [%rd39];
$L__BB4_13:
	add.s64 	%rd8, %rd5, %rd6;
	st.global.u32 	[%rd8], %r167;
	@%p7 bra 	$L__BB4_15;
	st.global.u32 	[%rd8+128], %r168;
$L__BB4_15:
	@%p8 bra 	$L__BB4_17;
	st.global.u32 	[%rd8+256], %r169;
$L__BB4_17:
	or.b32  	%r162, %r107, 512;
	@%p9 bra 	$L__BB4_19;
	st.global.u32 	[%rd8+384], %r170;
$L__BB4_19:
	and.b32  	%r137, %r16, -512;
	setp.eq.s32 	%p13, %r137, 0;
	@%p13 bra 	$L__BB4_54;
	cvt.u64.u32 	%rd49, %r162;
	add.s64 	%rd40, %rd49, %rd4;
	add.s64 	%rd50, %rd3, %rd40;
	add.s64 	%rd51, %rd5, %rd40;
$L__BB4_21:
	cvt.u32.u64 	%r35, %rd49;
	setp.ge.u32 	%p14, %r35, %r14;
	@%p14 bra 	$L__BB4_23;
	ld.global.cs.u32 %r167, [%rd50];
$L__BB4_23:
	add.s32 	%r38, %r35, 128;
	setp.ge.u32 	%p15, %r38, %r14;
	add.s64 	%rd15, %rd50, 128;
	@%p15 bra 	$L__BB4_25;
	ld.global.cs.u32 %r168, [%rd15];
$L__BB4_25:
	add.s32 	%r41, %r38, 128;
	setp.ge.u32 	%p16, %r41, %r14;
	add.s64 	%rd16, %rd50, 256;
	@%p16 bra 	$L__BB4_27;
	ld.global.cs.u32 %r169, [%rd16];
$L__BB4_27:
	add.s32 	%r44, %r41, 128;
	setp.ge.u32 	%p17, %r44, %r14;
	add.s64 	%rd17, %rd50, 384;
	@%p17 bra 	$L__BB4_29;
	ld.global.cs.u32 %r170, [%rd17];
$L__BB4_29:
	@%p14 bra 	$L__BB4_31;
	st.global.u32 	[%rd51], %r167;
$L__BB4_31:
	@%p15 bra 	$L__BB4_33;
	st.global.u32 	[%rd51+128], %r168;
$L__BB4_33:
	@%p16 bra 	$L__BB4_35;
	st.global.u32 	[%rd51+256], %r169;
$L__BB4_35:
	@%p17 bra 	$L__BB4_37;
	st.global.u32 	[%rd51+384], %r170;
$L__BB4_37:
	add.s32 	%r47, %r44, 128;
	setp.ge.u32 	%p22, %r47, %r14;
	add.s64 	%rd18, %rd50, 512;
	@%p22 bra 	$L__BB4_39;
	ld.global.cs.u32 %r167, [%rd18];
$L__BB4_39:
	add.s32 	%r50, %r47, 128;
	setp.ge.u32 	%p23, %r50, %r14;
	add.s64 	%rd19, %rd50, 640;
	@%p23 bra 	$L__BB4_41;
	ld.global.cs.u32 %r168, [%rd19];
$L__BB4_41:
	add.s32 	%r53, %r50, 128;
	setp.ge.u32 	%p24, %r53, %r14;
	add.s64 	%rd20, %rd50, 768;
	@%p24 bra 	$L__BB4_43;
	ld.global.cs.u32 %r169, [%rd20];
$L__BB4_43:
	add.s32 	%r56, %r53, 128;
	setp.ge.u32 	%p25, %r56, %r14;
	add.s64 	%rd21, %rd50, 896;
	@%p25 bra 	$L__BB4_45;
	ld.global.cs.u32 %r170, [%rd21];
$L__BB4_45:
	@%p22 bra 	$L__BB4_47;
	st.global.u32 	[%rd51+512], %r167;
$L__BB4_47:
	@%p23 bra 	$L__BB4_49;
	st.global.u32 	[%rd51+640], %r168;
$L__BB4_49:
	@%p24 bra 	$L__BB4_51;
	st.global.u32 	[%rd51+768], %r169;
$L__BB4_51:
	@%p25 bra 	$L__BB4_53;
	st.global.u32 	[%rd51+896], %r170;
$L__BB4_53:
	add.s64 	%rd51, %rd51, 1024;
	add.s64 	%rd50, %rd50, 1024;
	add.s64 	%rd49, %rd49, 1024;
	cvt.u32.u64 	%r146, %rd49;
	setp.lt.u32 	%p30, %r146, %r14;
	@%p30 bra 	$L__BB4_21;
$L__BB4_54:
	mov.u32 	%r149, %nctaid.x;
	mad.lo.s32 	%r151, %r62, %r149, %r151;
	setp.lt.u32 	%p31, %r151, %r69;
	add.s32 	%r150, %r150, 1;
	@%p31 bra 	$L__BB4_2;
$L__BB4_55:
	ret;
}
.visible .entry copy_list_1(
	.param .align 8 .b8 copy_list_1_param_0[4088]
)
.maxntid 1024, 1, 1
.minnctapersm 2
{
	.reg .pred 	%p<32>;
	.reg .b16 	%rs<68>;
	.reg .b32 	%r<113>;
	.reg .b64 	%rd<42>;
	mov.b64 	%rd15, copy_list_1_param_0;
	mov.u32 	%r31, %ntid.x;
	shr.u32 	%r32, %r31, 5;
	mov.u32 	%r33, %ctaid.x;
	mov.u32 	%r34, %tid.x;
	shr.u32 	%r35, %r34, 5;
	mad.lo.s32 	%r107, %r32, %r33, %r35;
	add.s64 	%rd1, %rd15, 4;
	ld.param.u32 	%r36, [copy_list_1_param_0+4];
	setp.ge.u32 	%p1, %r107, %r36;
	@%p1 bra 	$L__BB5_55;
	ld.param.v2.u32 	{%r38, %r39}, [%rd1+-4];
	mov.u32 	%r37, 0;
	mov.u32 	%r106, %r37;
$L__BB5_2:
	setp.lt.u32 	%p2, %r38, 2;
	mov.u32 	%r110, %r37;
	@%p2 bra 	$L__BB5_5;
	mov.u32 	%r110, 0;
	mov.u32 	%r108, %r38;
$L__BB5_4:
	add.s32 	%r42, %r108, %r110;
	shr.u32 	%r43, %r42, 1;
	mul.wide.u32 	%rd17, %r43, 4;
	add.s64 	%rd18, %rd15, %rd17;
	ld.param.u32 	%r44, [%rd18+8];
	setp.le.u32 	%p3, %r44, %r107;
	selp.b32 	%r110, %r43, %r110, %p3;
	selp.b32 	%r108, %r108, %r43, %p3;
	sub.s32 	%r45, %r108, %r110;
	setp.gt.u32 	%p4, %r45, 1;
	@%p4 bra 	$L__BB5_4;
$L__BB5_5:
	mul.wide.u32 	%rd20, %r110, 4;
	add.s64 	%rd21, %rd15, %rd20;
	ld.param.u32 	%r12, [%rd21+8];
	sub.s32 	%r46, %r107, %r12;
	shl.b32 	%r47, %r46, 11;
	mul.wide.u32 	%rd22, %r110, 8;
	add.s64 	%rd23, %rd15, %rd22;
	ld.param.u64 	%rd3, [%rd23+2728];
	cvt.u64.u32 	%rd4, %r47;
	ld.param.u64 	%rd24, [%rd23+1368];
	cvta.to.global.u64 	%rd5, %rd24;
	ld.param.u32 	%r13, [%rd21+688];
	sub.s32 	%r48, %r13, %r47;
	min.u32 	%r14, %r48, 2048;
	and.b32  	%r112, %r34, 31;
	setp.ge.u32 	%p5, %r112, %r14;
	@%p5 bra 	$L__BB5_54;
	mov.u32 	%r53, %nctaid.x;
	mul.lo.s32 	%r54, %r32, %r53;
	shl.b32 	%r55, %r54, 11;
	mad.lo.s32 	%r59, %r32, %r33, %r35;
	shl.b32 	%r60, %r59, 11;
	mad.lo.s32 	%r61, %r55, %r106, %r60;
	add.s32 	%r62, %r61, -1;
	sub.s32 	%r63, %r62, %r13;
	shl.b32 	%r64, %r12, 11;
	sub.s32 	%r65, %r63, %r64;
	max.u32 	%r66, %r65, -2049;
	mov.u32 	%r67, -2;
	sub.s32 	%r68, %r67, %r112;
	sub.s32 	%r16, %r68, %r66;
	and.b32  	%r69, %r16, 128;
	setp.ne.s32 	%p6, %r69, 0;
	@%p6 bra 	$L__BB5_19;
	and.b32  	%r72, %r34, 31;
	cvt.u64.u32 	%rd26, %r72;
	add.s64 	%rd6, %rd26, %rd4;
	add.s64 	%rd25, %rd3, %rd6;
	ld.global.cs.u8 %r70, [%rd25];
	cvt.u16.u32 	%rs56, %r70;
	or.b32  	%r73, %r72, 32;
	setp.ge.u32 	%p7, %r73, %r14;
	@%p7 bra 	$L__BB5_9;
	add.s64 	%rd27, %rd25, 32;
	ld.global.cs.u8 %r74, [%rd27];
	cvt.u16.u32 	%rs57, %r74;
$L__BB5_9:
	or.b32  	%r77, %r72, 64;
	setp.ge.u32 	%p8, %r77, %r14;
	@%p8 bra 	$L__BB5_11;
	add.s64 	%rd28, %rd25, 64;
	ld.global.cs.u8 %r78, [%rd28];
	cvt.u16.u32 	%rs58, %r78;
$L__BB5_11:
	or.b32  	%r81, %r72, 96;
	setp.ge.u32 	%p9, %r81, %r14;
	@%p9 bra 	$L__BB5_13;
	add.s64 	%rd29, %rd25, 96;
	ld.global.cs.u8 %r82, [%rd29];
	cvt.u16.u32 	%rs59, %r82;
$L__BB5_13:
	add.s64 	%rd8, %rd5, %rd6;
	st.global.u8 	[%rd8], %rs56;
	@%p7 bra 	$L__BB5_15;
	st.global.u8 	[%rd8+32], %rs57;
$L__BB5_15:
	@%p8 bra 	$L__BB5_17;
	st.global.u8 	[%rd8+64], %rs58;
$L__BB5_17:
	or.b32  	%r112, %r72, 128;
	@%p9 bra 	$L__BB5_19;
	st.global.u8 	[%rd8+96], %rs59;
$L__BB5_19:
	and.b32  	%r94, %r16, -128;
	setp.eq.s32 	%p13, %r94, 0;
	@%p13 bra 	$L__BB5_54;
	cvt.u64.u32 	%rd30, %r112;
	add.s64 	%rd31, %rd30, %rd4;
	add.s64 	%rd40, %rd3, %rd31;
	add.s64 	%rd41, %rd5, %rd31;
$L__BB5_21:
	setp.ge.u32 	%p14, %r112, %r14;
	@%p14 bra 	$L__BB5_23;
	ld.global.cs.u8 %r95, [%rd40];
	cvt.u16.u32 	%rs56, %r95;
$L__BB5_23:
	add.s32 	%r21, %r112, 32;
	setp.ge.u32 	%p15, %r21, %r14;
	@%p15 bra 	$L__BB5_25;
	add.s64 	%rd33, %rd40, 32;
	ld.global.cs.u8 %r96, [%rd33];
	cvt.u16.u32 	%rs57, %r96;
$L__BB5_25:
	add.s32 	%r22, %r21, 32;
	setp.ge.u32 	%p16, %r22, %r14;
	@%p16 bra 	$L__BB5_27;
	add.s64 	%rd34, %rd40, 64;
	ld.global.cs.u8 %r97, [%rd34];
	cvt.u16.u32 	%rs58, %r97;
$L__BB5_27:
	add.s32 	%r23, %r22, 32;
	setp.ge.u32 	%p17, %r23, %r14;
	@%p17 bra 	$L__BB5_29;
	add.s64 	%rd35, %rd40, 96;
	ld.global.cs.u8 %r98, [%rd35];
	cvt.u16.u32 	%rs59, %r98;
$L__BB5_29:
	@%p14 bra 	$L__BB5_31;
	st.global.u8 	[%rd41], %rs56;
$L__BB5_31:
	@%p15 bra 	$L__BB5_33;
	st.global.u8 	[%rd41+32], %rs57;
$L__BB5_33:
	@%p16 bra 	$L__BB5_35;
	st.global.u8 	[%rd41+64], %rs58;
$L__BB5_35:
	@%p17 bra 	$L__BB5_37;
	st.global.u8 	[%rd41+96], %rs59;
$L__BB5_37:
	add.s32 	%r24, %r23, 32;
	setp.ge.u32 	%p22, %r24, %r14;
	@%p22 bra 	$L__BB5_39;
	add.s64 	%rd36, %rd40, 128;
	ld.global.cs.u8 %r99, [%rd36];
	cvt.u16.u32 	%rs56, %r99;
$L__BB5_39:
	add.s32 	%r25, %r24, 32;
	setp.ge.u32 	%p23, %r25, %r14;
	@%p23 bra 	$L__BB5_41;
	add.s64 	%rd37, %rd40, 160;
	ld.global.cs.u8 %r100, [%rd37];
	cvt.u16.u32 	%rs57, %r100;
$L__BB5_41:
	add.s32 	%r26, %r25, 32;
	setp.ge.u32 	%p24, %r26, %r14;
	@%p24 bra 	$L__BB5_43;
	add.s64 	%rd38, %rd40, 192;
	ld.global.cs.u8 %r101, [%rd38];
	cvt.u16.u32 	%rs58, %r101;
$L__BB5_43:
	add.s32 	%r27, %r26, 32;
	setp.ge.u32 	%p25, %r27, %r14;
	@%p25 bra 	$L__BB5_45;
	add.s64 	%rd39, %rd40, 224;
	ld.global.cs.u8 %r102, [%rd39];
	cvt.u16.u32 	%rs59, %r102;
$L__BB5_45:
	@%p22 bra 	$L__BB5_47;
	st.global.u8 	[%rd41+128], %rs56;
$L__BB5_47:
	@%p23 bra 	$L__BB5_49;
	st.global.u8 	[%rd41+160], %rs57;
$L__BB5_49:
	@%p24 bra 	$L__BB5_51;
	st.global.u8 	[%rd41+192], %rs58;
$L__BB5_51:
	@%p25 bra 	$L__BB5_53;
	st.global.u8 	[%rd41+224], %rs59;
$L__BB5_53:
	add.s64 	%rd41, %rd41, 256;
	add.s64 	%rd40, %rd40, 256;
	add.s32 	%r112, %r27, 32;
	setp.lt.u32 	%p30, %r112, %r14;
	@%p30 bra 	$L__BB5_21;
$L__BB5_54:
	mov.u32 	%r105, %nctaid.x;
	mad.lo.s32 	%r107, %r32, %r105, %r107;
	setp.lt.u32 	%p31, %r107, %r39;
	add.s32 	%r106, %r106, 1;
	@%p31 bra 	$L__BB5_2;
$L__BB5_55:
	ret;
}
.visible .entry copy_part_16(
	.param .align 8 .b8 copy_part_16_param_0[3712]
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<31>;
	.reg .b32 	%r<233>;
	.reg .b64 	%rd<157>;
	mov.b64 	%rd34, copy_part_16_param_0;
	mov.u32 	%r71, %ntid.x;
	shl.b32 	%r72, %r71, 2;
	mov.u32 	%r73, %ctaid.x;
	mov.u32 	%r74, %tid.x;
	mad.lo.s32 	%r216, %r72, %r73, %r74;
	add.s64 	%rd1, %rd34, 44;
	ld.param.u32 	%r2, [copy_part_16_param_0+44];
	setp.ge.u32 	%p1, %r216, %r2;
	@%p1 bra 	$L__BB6_35;
	ld.param.v2.u32 	{%r76, %r77}, [%rd1+-4];
	ld.param.v2.u32 	{%r78, %r79}, [%rd1+4];
	ld.param.u32 	%r7, [%rd1+16];
	ld.param.v2.u32 	{%r80, %r81}, [%rd1+12];
	ld.param.u32 	%r10, [%rd1+28];
	ld.param.v2.u32 	{%r82, %r83}, [%rd1+20];
	ld.param.v2.u32 	{%r84, %r85}, [%rd1+28];
	ld.param.u64 	%rd2, [%rd1+-44];
	ld.param.u64 	%rd3, [%rd1+-36];
	ld.param.u64 	%rd4, [%rd1+-28];
	ld.param.u32 	%r15, [%rd1+40];
	ld.param.v2.u32 	{%r86, %r87}, [%rd1+36];
	ld.param.u64 	%rd5, [%rd1+-20];
$L__BB6_2:
	setp.ge.u32 	%p2, %r216, %r2;
	@%p2 bra 	$L__BB6_6;
	setp.ne.s32 	%p3, %r15, 0;
	setp.eq.s32 	%p4, %r78, 1;
	add.s32 	%r88, %r76, %r216;
	mul.wide.u32 	%rd37, %r79, %r88;
	shr.u64 	%rd38, %rd37, 32;
	cvt.u32.u64 	%r89, %rd38;
	shr.u32 	%r90, %r89, %r80;
	selp.b32 	%r91, %r88, %r90, %p4;
	mul.lo.s32 	%r92, %r78, %r91;
	sub.s32 	%r93, %r88, %r92;
	mul.wide.u32 	%rd39, %r82, %r93;
	shr.u64 	%rd40, %rd39, 32;
	cvt.u32.u64 	%r94, %rd40;
	shr.u32 	%r95, %r94, %r83;
	setp.eq.s32 	%p5, %r7, 1;
	selp.b32 	%r96, %r93, %r95, %p5;
	mul.lo.s32 	%r97, %r81, %r96;
	sub.s32 	%r98, %r93, %r97;
	mul.wide.u32 	%rd41, %r85, %r96;
	shr.u64 	%rd42, %rd41, 32;
	cvt.u32.u64 	%r99, %rd42;
	shr.u32 	%r100, %r99, %r86;
	setp.eq.s32 	%p6, %r10, 1;
	selp.b32 	%r101, %r96, %r100, %p6;
	mul.lo.s32 	%r102, %r84, %r101;
	sub.s32 	%r103, %r96, %r102;
	cvta.to.global.u64 	%rd43, %rd2;
	mul.wide.u32 	%rd44, %r101, 8;
	add.s64 	%rd45, %rd43, %rd44;
	mul.wide.u32 	%rd47, %r91, 4;
	add.s64 	%rd48, %rd34, %rd47;
	ld.param.u32 	%rd49, [%rd48+112];
	cvta.to.global.u64 	%rd50, %rd3;
	add.s64 	%rd51, %rd50, %rd44;
	ld.global.u64 	%rd52, [%rd51];
	mul.lo.s64 	%rd53, %rd52, %rd49;
	cvt.u64.u32 	%rd54, %r103;
	mul.lo.s64 	%rd55, %rd4, %rd54;
	mul.wide.u32 	%rd56, %r98, 16;
	add.s64 	%rd57, %rd53, %rd56;
	add.s64 	%rd58, %rd57, %rd55;
	ld.global.u64 	%rd59, [%rd45];
	add.s64 	%rd146, %rd59, %rd58;
	mov.u64 	%rd145, %rd146;
	@%p3 bra 	$L__BB6_5;
	mul.wide.u32 	%rd60, %r216, 16;
	add.s64 	%rd145, %rd5, %rd60;
$L__BB6_5:
	ld.global.cs.v4.u32 {%r220,%r219,%r218,%r217}, [%rd145];
$L__BB6_6:
	add.s32 	%r109, %r71, %r216;
	setp.ge.u32 	%p7, %r109, %r2;
	@%p7 bra 	$L__BB6_10;
	add.s32 	%r195, %r71, %r216;
	setp.ne.s32 	%p8, %r15, 0;
	setp.eq.s32 	%p9, %r78, 1;
	add.s32 	%r112, %r76, %r195;
	mul.wide.u32 	%rd62, %r79, %r112;
	shr.u64 	%rd63, %rd62, 32;
	cvt.u32.u64 	%r113, %rd63;
	shr.u32 	%r114, %r113, %r80;
	selp.b32 	%r115, %r112, %r114, %p9;
	mul.lo.s32 	%r116, %r78, %r115;
	sub.s32 	%r117, %r112, %r116;
	mul.wide.u32 	%rd64, %r82, %r117;
	shr.u64 	%rd65, %rd64, 32;
	cvt.u32.u64 	%r118, %rd65;
	shr.u32 	%r119, %r118, %r83;
	setp.eq.s32 	%p10, %r7, 1;
	selp.b32 	%r120, %r117, %r119, %p10;
	mul.lo.s32 	%r121, %r81, %r120;
	sub.s32 	%r122, %r117, %r121;
	mul.wide.u32 	%rd66, %r85, %r120;
	shr.u64 	%rd67, %rd66, 32;
	cvt.u32.u64 	%r123, %rd67;
	shr.u32 	%r124, %r123, %r86;
	setp.eq.s32 	%p11, %r10, 1;
	selp.b32 	%r125, %r120, %r124, %p11;
	mul.lo.s32 	%r126, %r84, %r125;
	sub.s32 	%r127, %r120, %r126;
	cvta.to.global.u64 	%rd68, %rd2;
	mul.wide.u32 	%rd69, %r125, 8;
	add.s64 	%rd70, %rd68, %rd69;
	mul.wide.u32 	%rd72, %r115, 4;
	add.s64 	%rd73, %rd34, %rd72;
	ld.param.u32 	%rd74, [%rd73+112];
	cvta.to.global.u64 	%rd75, %rd3;
	add.s64 	%rd76, %rd75, %rd69;
	ld.global.u64 	%rd77, [%rd76];
	mul.lo.s64 	%rd78, %rd77, %rd74;
	cvt.u64.u32 	%rd79, %r127;
	mul.lo.s64 	%rd80, %rd4, %rd79;
	mul.wide.u32 	%rd81, %r122, 16;
	add.s64 	%rd82, %rd78, %rd81;
	add.s64 	%rd83, %rd82, %rd80;
	ld.global.u64 	%rd84, [%rd70];
	add.s64 	%rd148, %rd84, %rd83;
	mov.u64 	%rd147, %rd148;
	@%p8 bra 	$L__BB6_9;
	add.s32 	%r196, %r71, %r216;
	mul.wide.u32 	%rd85, %r196, 16;
	add.s64 	%rd147, %rd5, %rd85;
$L__BB6_9:
	ld.global.cs.v4.u32 {%r224,%r223,%r222,%r221}, [%rd147];
$L__BB6_10:
	add.s32 	%r188, %r71, %r216;
	add.s32 	%r51, %r188, %r71;
	setp.ge.u32 	%p12, %r51, %r2;
	@%p12 bra 	$L__BB6_14;
	add.s32 	%r192, %r71, %r216;
	add.s32 	%r191, %r188, %r71;
	setp.ne.s32 	%p13, %r15, 0;
	setp.eq.s32 	%p14, %r78, 1;
	add.s32 	%r136, %r76, %r191;
	mul.wide.u32 	%rd87, %r79, %r136;
	shr.u64 	%rd88, %rd87, 32;
	cvt.u32.u64 	%r137, %rd88;
	shr.u32 	%r138, %r137, %r80;
	selp.b32 	%r139, %r136, %r138, %p14;
	mul.lo.s32 	%r140, %r78, %r139;
	sub.s32 	%r141, %r136, %r140;
	mul.wide.u32 	%rd89, %r82, %r141;
	shr.u64 	%rd90, %rd89, 32;
	cvt.u32.u64 	%r142, %rd90;
	shr.u32 	%r143, %r142, %r83;
	setp.eq.s32 	%p15, %r7, 1;
	selp.b32 	%r144, %r141, %r143, %p15;
	mul.lo.s32 	%r145, %r81, %r144;
	sub.s32 	%r146, %r141, %r145;
	mul.wide.u32 	%rd91, %r85, %r144;
	shr.u64 	%rd92, %rd91, 32;
	cvt.u32.u64 	%r147, %rd92;
	shr.u32 	%r148, %r147, %r86;
	setp.eq.s32 	%p16, %r10, 1;
	selp.b32 	%r149, %r144, %r148, %p16;
	mul.lo.s32 	%r150, %r84, %r149;
	sub.s32 	%r151, %r144, %r150;
	cvta.to.global.u64 	%rd93, %rd2;
	mul.wide.u32 	%rd94, %r149, 8;
	add.s64 	%rd95, %rd93, %rd94;
	mul.wide.u32 	%rd97, %r139, 4;
	add.s64 	%rd98, %rd34, %rd97;
	ld.param.u32 	%rd99, [%rd98+112];
	cvta.to.global.u64 	%rd100, %rd3;
	add.s64 	%rd101, %rd100, %rd94;
	ld.global.u64 	%rd102, [%rd101];
	mul.lo.s64 	%rd103, %rd102, %rd99;
	cvt.u64.u32 	%rd104, %r151;
	mul.lo.s64 	%rd105, %rd4, %rd104;
	mul.wide.u32 	%rd106, %r146, 16;
	add.s64 	%rd107, %rd103, %rd106;
	add.s64 	%rd108, %rd107, %rd105;
	ld.global.u64 	%rd109, [%rd95];
	add.s64 	%rd150, %rd109, %rd108;
	mov.u64 	%rd149, %rd150;
	@%p13 bra 	$L__BB6_13;
	add.s32 	%r194, %r71, %r216;
	add.s32 	%r193, %r188, %r71;
	mul.wide.u32 	%rd110, %r193, 16;
	add.s64 	%rd149, %rd5, %rd110;
$L__BB6_13:
	ld.global.cs.v4.u32 {%r228,%r227,%r226,%r225}, [%rd149];
$L__BB6_14:
	add.s32 	%r190, %r71, %r216;
	add.s32 	%r189, %r188, %r71;
	add.s32 	%r60, %r189, %r71;
	setp.ge.u32 	%p17, %r60, %r2;
	@%p17 bra 	$L__BB6_18;
	setp.ne.s32 	%p18, %r15, 0;
	setp.eq.s32 	%p19, %r78, 1;
	add.s32 	%r157, %r76, %r60;
	mul.wide.u32 	%rd112, %r79, %r157;
	shr.u64 	%rd113, %rd112, 32;
	cvt.u32.u64 	%r158, %rd113;
	shr.u32 	%r159, %r158, %r80;
	selp.b32 	%r160, %r157, %r159, %p19;
	mul.lo.s32 	%r161, %r78, %r160;
	sub.s32 	%r162, %r157, %r161;
	mul.wide.u32 	%rd114, %r82, %r162;
	shr.u64 	%rd115, %rd114, 32;
	cvt.u32.u64 	%r163, %rd115;
	shr.u32 	%r164, %r163, %r83;
	setp.eq.s32 	%p20, %r7, 1;
	selp.b32 	%r165, %r162, %r164, %p20;
	mul.lo.s32 	%r166, %r81, %r165;
	sub.s32 	%r167, %r162, %r166;
	mul.wide.u32 	%rd116, %r85, %r165;
	shr.u64 	%rd117, %rd116, 32;
	cvt.u32.u64 	%r168, %rd117;
	shr.u32 	%r169, %r168, %r86;
	setp.eq.s32 	%p21, %r10, 1;
	selp.b32 	%r170, %r165, %r169, %p21;
	mul.lo.s32 	%r171, %r84, %r170;
	sub.s32 	%r172, %r165, %r171;
	cvta.to.global.u64 	%rd118, %rd2;
	mul.wide.u32 	%rd119, %r170, 8;
	add.s64 	%rd120, %rd118, %rd119;
	mul.wide.u32 	%rd122, %r160, 4;
	add.s64 	%rd123, %rd34, %rd122;
	ld.param.u32 	%rd124, [%rd123+112];
	cvta.to.global.u64 	%rd125, %rd3;
	add.s64 	%rd126, %rd125, %rd119;
	ld.global.u64 	%rd127, [%rd126];
	mul.lo.s64 	%rd128, %rd127, %rd124;
	cvt.u64.u32 	%rd129, %r172;
	mul.lo.s64 	%rd130, %rd4, %rd129;
	mul.wide.u32 	%rd131, %r167, 16;
	add.s64 	%rd132, %rd128, %rd131;
	add.s64 	%rd133, %rd132, %rd130;
	ld.global.u64 	%rd134, [%rd120];
	add.s64 	%rd152, %rd134, %rd133;
	mov.u64 	%rd151, %rd152;
	@%p18 bra 	$L__BB6_17;
	mul.wide.u32 	%rd135, %r60, 16;
	add.s64 	%rd151, %rd5, %rd135;
$L__BB6_17:
	ld.global.cs.v4.u32 {%r232,%r231,%r230,%r229}, [%rd151];
$L__BB6_18:
	setp.ge.u32 	%p22, %r216, %r77;
	@%p22 bra 	$L__BB6_22;
	setp.eq.s32 	%p23, %r87, 0;
	mov.u64 	%rd153, %rd146;
	@%p23 bra 	$L__BB6_21;
	mul.wide.u32 	%rd137, %r216, 16;
	add.s64 	%rd153, %rd5, %rd137;
$L__BB6_21:
	st.v4.u32 	[%rd153], {%r220, %r219, %r218, %r217};
$L__BB6_22:
	add.s32 	%r184, %r71, %r216;
	setp.ge.u32 	%p24, %r184, %r77;
	@%p24 bra 	$L__BB6_26;
	setp.eq.s32 	%p25, %r87, 0;
	mov.u64 	%rd154, %rd148;
	@%p25 bra 	$L__BB6_25;
	add.s32 	%r199, %r71, %r216;
	mul.wide.u32 	%rd138, %r199, 16;
	add.s64 	%rd154, %rd5, %rd138;
$L__BB6_25:
	st.v4.u32 	[%rd154], {%r224, %r223, %r222, %r221};
$L__BB6_26:
	add.s32 	%r186, %r71, %r216;
	add.s32 	%r185, %r186, %r71;
	setp.ge.u32 	%p26, %r185, %r77;
	@%p26 bra 	$L__BB6_30;
	setp.eq.s32 	%p27, %r87, 0;
	mov.u64 	%rd155, %rd150;
	@%p27 bra 	$L__BB6_29;
	add.s32 	%r198, %r71, %r216;
	add.s32 	%r197, %r188, %r71;
	mul.wide.u32 	%rd139, %r197, 16;
	add.s64 	%rd155, %rd5, %rd139;
$L__BB6_29:
	st.v4.u32 	[%rd155], {%r228, %r227, %r226, %r225};
$L__BB6_30:
	setp.ge.u32 	%p28, %r60, %r77;
	@%p28 bra 	$L__BB6_34;
	setp.eq.s32 	%p29, %r87, 0;
	mov.u64 	%rd156, %rd152;
	@%p29 bra 	$L__BB6_33;
	mul.wide.u32 	%rd140, %r60, 16;
	add.s64 	%rd156, %rd5, %rd140;
$L__BB6_33:
	st.v4.u32 	[%rd156], {%r232, %r231, %r230, %r229};
$L__BB6_34:
	shl.b32 	%r187, %r71, 2;
	mov.u32 	%r183, %nctaid.x;
	mad.lo.s32 	%r216, %r187, %r183, %r216;
	setp.lt.u32 	%p30, %r216, %r77;
	@%p30 bra 	$L__BB6_2;
$L__BB6_35:
	ret;
}
.visible .entry copy_part_4(
	.param .align 8 .b8 copy_part_4_param_0[3712]
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<31>;
	.reg .b32 	%r<144>;
	.reg .b64 	%rd<172>;
	mov.b64 	%rd37, copy_part_4_param_0;
	mov.u32 	%r1, %ntid.x;
	shl.b32 	%r2, %r1, 2;
	mov.u32 	%r39, %ctaid.x;
	mov.u32 	%r40, %tid.x;
	mad.lo.s32 	%r139, %r2, %r39, %r40;
	add.s64 	%rd1, %rd37, 44;
	ld.param.u32 	%r4, [copy_part_4_param_0+44];
	setp.ge.u32 	%p1, %r139, %r4;
	@%p1 bra 	$L__BB7_35;
	ld.param.v2.u32 	{%r42, %r43}, [%rd1+-4];
	ld.param.v2.u32 	{%r44, %r45}, [%rd1+4];
	ld.param.u32 	%r10, [%rd1+16];
	cvt.u64.u32 	%rd2, %r45;
	ld.param.v2.u32 	{%r46, %r47}, [%rd1+12];
	ld.param.u32 	%r13, [%rd1+28];
	ld.param.v2.u32 	{%r48, %r49}, [%rd1+20];
	cvt.u64.u32 	%rd3, %r48;
	ld.param.v2.u32 	{%r50, %r51}, [%rd1+28];
	ld.param.u64 	%rd4, [%rd1+-44];
	ld.param.u64 	%rd5, [%rd1+-36];
	ld.param.u64 	%rd6, [%rd1+-28];
	ld.param.u32 	%r18, [%rd1+40];
	cvt.u64.u32 	%rd7, %r51;
	ld.param.v2.u32 	{%r52, %r53}, [%rd1+36];
	ld.param.u64 	%rd8, [%rd1+-20];
	mov.u32 	%r54, %nctaid.x;
	mul.lo.s32 	%r21, %r2, %r54;
$L__BB7_2:
	setp.ge.u32 	%p2, %r139, %r4;
	@%p2 bra 	$L__BB7_6;
	setp.ne.s32 	%p3, %r18, 0;
	setp.eq.s32 	%p4, %r44, 1;
	add.s32 	%r55, %r42, %r139;
	cvt.u64.u32 	%rd40, %r55;
	mul.lo.s64 	%rd41, %rd2, %rd40;
	shr.u64 	%rd42, %rd41, 32;
	cvt.u32.u64 	%r56, %rd42;
	shr.u32 	%r57, %r56, %r46;
	selp.b32 	%r58, %r55, %r57, %p4;
	mul.lo.s32 	%r59, %r44, %r58;
	sub.s32 	%r60, %r55, %r59;
	cvt.u64.u32 	%rd43, %r60;
	mul.lo.s64 	%rd44, %rd3, %rd43;
	shr.u64 	%rd45, %rd44, 32;
	cvt.u32.u64 	%r61, %rd45;
	shr.u32 	%r62, %r61, %r49;
	setp.eq.s32 	%p5, %r10, 1;
	selp.b32 	%r63, %r60, %r62, %p5;
	mul.lo.s32 	%r64, %r47, %r63;
	sub.s32 	%r65, %r60, %r64;
	cvt.u64.u32 	%rd46, %r63;
	mul.lo.s64 	%rd47, %rd7, %rd46;
	shr.u64 	%rd48, %rd47, 32;
	cvt.u32.u64 	%r66, %rd48;
	shr.u32 	%r67, %r66, %r52;
	setp.eq.s32 	%p6, %r13, 1;
	selp.b32 	%r68, %r63, %r67, %p6;
	mul.lo.s32 	%r69, %r50, %r68;
	sub.s32 	%r70, %r63, %r69;
	cvta.to.global.u64 	%rd49, %rd4;
	mul.wide.u32 	%rd50, %r68, 8;
	add.s64 	%rd51, %rd49, %rd50;
	mul.wide.u32 	%rd53, %r58, 4;
	add.s64 	%rd54, %rd37, %rd53;
	ld.param.u32 	%rd55, [%rd54+112];
	cvta.to.global.u64 	%rd56, %rd5;
	add.s64 	%rd57, %rd56, %rd50;
	ld.global.u64 	%rd58, [%rd57];
	mul.lo.s64 	%rd59, %rd58, %rd55;
	cvt.u64.u32 	%rd60, %r70;
	mul.lo.s64 	%rd61, %rd6, %rd60;
	mul.wide.u32 	%rd62, %r65, 4;
	add.s64 	%rd63, %rd59, %rd62;
	add.s64 	%rd64, %rd63, %rd61;
	ld.global.u64 	%rd65, [%rd51];
	add.s64 	%rd161, %rd65, %rd64;
	mov.u64 	%rd160, %rd161;
	@%p3 bra 	$L__BB7_5;
	mul.wide.u32 	%rd66, %r139, 4;
	add.s64 	%rd160, %rd8, %rd66;
$L__BB7_5:
	ld.global.cs.u32 %r140, [%rd160];
$L__BB7_6:
	add.s32 	%r29, %r1, %r139;
	setp.ge.u32 	%p7, %r29, %r4;
	@%p7 bra 	$L__BB7_10;
	setp.ne.s32 	%p8, %r18, 0;
	setp.eq.s32 	%p9, %r44, 1;
	add.s32 	%r72, %r42, %r29;
	cvt.u64.u32 	%rd68, %r72;
	mul.lo.s64 	%rd69, %rd2, %rd68;
	shr.u64 	%rd70, %rd69, 32;
	cvt.u32.u64 	%r73, %rd70;
	shr.u32 	%r74, %r73, %r46;
	selp.b32 	%r75, %r72, %r74, %p9;
	mul.lo.s32 	%r76, %r44, %r75;
	sub.s32 	%r77, %r72, %r76;
	cvt.u64.u32 	%rd71, %r77;
	mul.lo.s64 	%rd72, %rd3, %rd71;
	shr.u64 	%rd73, %rd72, 32;
	cvt.u32.u64 	%r78, %rd73;
	shr.u32 	%r79, %r78, %r49;
	setp.eq.s32 	%p10, %r10, 1;
	selp.b32 	%r80, %r77, %r79, %p10;
	mul.lo.s32 	%r81, %r47, %r80;
	sub.s32 	%r82, %r77, %r81;
	cvt.u64.u32 	%rd74, %r80;
	mul.lo.s64 	%rd75, %rd7, %rd74;
	shr.u64 	%rd76, %rd75, 32;
	cvt.u32.u64 	%r83, %rd76;
	shr.u32 	%r84, %r83, %r52;
	setp.eq.s32 	%p11, %r13, 1;
	selp.b32 	%r85, %r80, %r84, %p11;
	mul.lo.s32 	%r86, %r50, %r85;
	sub.s32 	%r87, %r80, %r86;
	cvta.to.global.u64 	%rd77, %rd4;
	mul.wide.u32 	%rd78, %r85, 8;
	add.s64 	%rd79, %rd77, %rd78;
	mul.wide.u32 	%rd81, %r75, 4;
	add.s64 	%rd82, %rd37, %rd81;
	ld.param.u32 	%rd83, [%rd82+112];
	cvta.to.global.u64 	%rd84, %rd5;
	add.s64 	%rd85, %rd84, %rd78;
	ld.global.u64 	%rd86, [%rd85];
	mul.lo.s64 	%rd87, %rd86, %rd83;
	cvt.u64.u32 	%rd88, %r87;
	mul.lo.s64 	%rd89, %rd6, %rd88;
	mul.wide.u32 	%rd90, %r82, 4;
	add.s64 	%rd91, %rd87, %rd90;
	add.s64 	%rd92, %rd91, %rd89;
	ld.global.u64 	%rd93, [%rd79];
	add.s64 	%rd163, %rd93, %rd92;
	mov.u64 	%rd162, %rd163;
	@%p8 bra 	$L__BB7_9;
	add.s32 	%r130, %r1, %r139;
	mul.wide.u32 	%rd94, %r130, 4;
	add.s64 	%rd162, %rd8, %rd94;
$L__BB7_9:
	ld.global.cs.u32 %r141, [%rd162];
$L__BB7_10:
	add.s32 	%r129, %r1, %r139;
	add.s32 	%r32, %r129, %r1;
	setp.ge.u32 	%p12, %r32, %r4;
	@%p12 bra 	$L__BB7_14;
	setp.ne.s32 	%p13, %r18, 0;
	setp.eq.s32 	%p14, %r44, 1;
	add.s32 	%r89, %r42, %r32;
	cvt.u64.u32 	%rd96, %r89;
	mul.lo.s64 	%rd97, %rd2, %rd96;
	shr.u64 	%rd98, %rd97, 32;
	cvt.u32.u64 	%r90, %rd98;
	shr.u32 	%r91, %r90, %r46;
	selp.b32 	%r92, %r89, %r91, %p14;
	mul.lo.s32 	%r93, %r44, %r92;
	sub.s32 	%r94, %r89, %r93;
	cvt.u64.u32 	%rd99, %r94;
	mul.lo.s64 	%rd100, %rd3, %rd99;
	shr.u64 	%rd101, %rd100, 32;
	cvt.u32.u64 	%r95, %rd101;
	shr.u32 	%r96, %r95, %r49;
	setp.eq.s32 	%p15, %r10, 1;
	selp.b32 	%r97, %r94, %r96, %p15;
	mul.lo.s32 	%r98, %r47, %r97;
	sub.s32 	%r99, %r94, %r98;
	cvt.u64.u32 	%rd102, %r97;
	mul.lo.s64 	%rd103, %rd7, %rd102;
	shr.u64 	%rd104, %rd103, 32;
	cvt.u32.u64 	%r100, %rd104;
	shr.u32 	%r101, %r100, %r52;
	setp.eq.s32 	%p16, %r13, 1;
	selp.b32 	%r102, %r97, %r101, %p16;
	mul.lo.s32 	%r103, %r50, %r102;
	sub.s32 	%r104, %r97, %r103;
	cvta.to.global.u64 	%rd105, %rd4;
	mul.wide.u32 	%rd106, %r102, 8;
	add.s64 	%rd107, %rd105, %rd106;
	mul.wide.u32 	%rd109, %r92, 4;
	add.s64 	%rd110, %rd37, %rd109;
	ld.param.u32 	%rd111, [%rd110+112];
	cvta.to.global.u64 	%rd112, %rd5;
	add.s64 	%rd113, %rd112, %rd106;
	ld.global.u64 	%rd114, [%rd113];
	mul.lo.s64 	%rd115, %rd114, %rd111;
	cvt.u64.u32 	%rd116, %r104;
	mul.lo.s64 	%rd117, %rd6, %rd116;
	mul.wide.u32 	%rd118, %r99, 4;
	add.s64 	%rd119, %rd115, %rd118;
	add.s64 	%rd120, %rd119, %rd117;
	ld.global.u64 	%rd121, [%rd107];
	add.s64 	%rd165, %rd121, %rd120;
	mov.u64 	%rd164, %rd165;
	@%p13 bra 	$L__BB7_13;
	add.s32 	%r134, %r1, %r139;
	add.s32 	%r133, %r134, %r1;
	mul.wide.u32 	%rd122, %r133, 4;
	add.s64 	%rd164, %rd8, %rd122;
$L__BB7_13:
	ld.global.cs.u32 %r142, [%rd164];
$L__BB7_14:
	add.s32 	%r132, %r1, %r139;
	add.s32 	%r131, %r132, %r1;
	add.s32 	%r35, %r131, %r1;
	setp.ge.u32 	%p17, %r35, %r4;
	@%p17 bra 	$L__BB7_18;
	setp.ne.s32 	%p18, %r18, 0;
	setp.eq.s32 	%p19, %r44, 1;
	add.s32 	%r106, %r42, %r35;
	cvt.u64.u32 	%rd124, %r106;
	mul.lo.s64 	%rd125, %rd2, %rd124;
	shr.u64 	%rd126, %rd125, 32;
	cvt.u32.u64 	%r107, %rd126;
	shr.u32 	%r108, %r107, %r46;
	selp.b32 	%r109, %r106, %r108, %p19;
	mul.lo.s32 	%r110, %r44, %r109;
	sub.s32 	%r111, %r106, %r110;
	cvt.u64.u32 	%rd127, %r111;
	mul.lo.s64 	%rd128, %rd3, %rd127;
	shr.u64 	%rd129, %rd128, 32;
	cvt.u32.u64 	%r112, %rd129;
	shr.u32 	%r113, %r112, %r49;
	setp.eq.s32 	%p20, %r10, 1;
	selp.b32 	%r114, %r111, %r113, %p20;
	mul.lo.s32 	%r115, %r47, %r114;
	sub.s32 	%r116, %r111, %r115;
	cvt.u64.u32 	%rd130, %r114;
	mul.lo.s64 	%rd131, %rd7, %rd130;
	shr.u64 	%rd132, %rd131, 32;
	cvt.u32.u64 	%r117, %rd132;
	shr.u32 	%r118, %r117, %r52;
	setp.eq.s32 	%p21, %r13, 1;
	selp.b32 	%r119, %r114, %r118, %p21;
	mul.lo.s32 	%r120, %r50, %r119;
	sub.s32 	%r121, %r114, %r120;
	cvta.to.global.u64 	%rd133, %rd4;
	mul.wide.u32 	%rd134, %r119, 8;
	add.s64 	%rd135, %rd133, %rd134;
	mul.wide.u32 	%rd137, %r109, 4;
	add.s64 	%rd138, %rd37, %rd137;
	ld.param.u32 	%rd139, [%rd138+112];
	cvta.to.global.u64 	%rd140, %rd5;
	add.s64 	%rd141, %rd140, %rd134;
	ld.global.u64 	%rd142, [%rd141];
	mul.lo.s64 	%rd143, %rd142, %rd139;
	cvt.u64.u32 	%rd144, %r121;
	mul.lo.s64 	%rd145, %rd6, %rd144;
	mul.wide.u32 	%rd146, %r116, 4;
	add.s64 	%rd147, %rd143, %rd146;
	add.s64 	%rd148, %rd147, %rd145;
	ld.global.u64 	%rd149, [%rd135];
	add.s64 	%rd167, %rd149, %rd148;
	mov.u64 	%rd166, %rd167;
	@%p18 bra 	$L__BB7_17;
	mul.wide.u32 	%rd150, %r35, 4;
	add.s64 	%rd166, %rd8, %rd150;
$L__BB7_17:
	ld.global.cs.u32 %r143, [%rd166];
$L__BB7_18:
	setp.ge.u32 	%p22, %r139, %r43;
	@%p22 bra 	$L__BB7_22;
	setp.eq.s32 	%p23, %r53, 0;
	mov.u64 	%rd168, %rd161;
	@%p23 bra 	$L__BB7_21;
	mul.wide.u32 	%rd152, %r139, 4;
	add.s64 	%rd168, %rd8, %rd152;
$L__BB7_21:
	st.u32 	[%rd168], %r140;
$L__BB7_22:
	add.s32 	%r123, %r1, %r139;
	setp.ge.u32 	%p24, %r123, %r43;
	@%p24 bra 	$L__BB7_26;
	setp.eq.s32 	%p25, %r53, 0;
	mov.u64 	%rd169, %rd163;
	@%p25 bra 	$L__BB7_25;
	add.s32 	%r128, %r1, %r139;
	mul.wide.u32 	%rd153, %r128, 4;
	add.s64 	%rd169, %rd8, %rd153;
$L__BB7_25:
	st.u32 	[%rd169], %r141;
$L__BB7_26:
	add.s32 	%r125, %r1, %r139;
	add.s32 	%r124, %r125, %r1;
	setp.ge.u32 	%p26, %r124, %r43;
	@%p26 bra 	$L__BB7_30;
	setp.eq.s32 	%p27, %r53, 0;
	mov.u64 	%rd170, %rd165;
	@%p27 bra 	$L__BB7_29;
	add.s32 	%r127, %r1, %r139;
	add.s32 	%r126, %r127, %r1;
	mul.wide.u32 	%rd154, %r126, 4;
	add.s64 	%rd170, %rd8, %rd154;
$L__BB7_29:
	st.u32 	[%rd170], %r142;
$L__BB7_30:
	setp.ge.u32 	%p28, %r35, %r43;
	@%p28 bra 	$L__BB7_34;
	setp.eq.s32 	%p29, %r53, 0;
	mov.u64 	%rd171, %rd167;
	@%p29 bra 	$L__BB7_33;
	mul.wide.u32 	%rd155, %r35, 4;
	add.s64 	%rd171, %rd8, %rd155;
$L__BB7_33:
	st.u32 	[%rd171], %r143;
$L__BB7_34:
	add.s32 	%r139, %r139, %r21;
	setp.lt.u32 	%p30, %r139, %r43;
	@%p30 bra 	$L__BB7_2;
$L__BB7_35:
	ret;
}
.visible .entry copy_part_1(
	.param .align 8 .b8 copy_part_1_param_0[3712]
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<31>;
	.reg .b16 	%rs<22>;
	.reg .b32 	%r<123>;
	.reg .b64 	%rd<172>;
	mov.b64 	%rd37, copy_part_1_param_0;
	mov.u32 	%r1, %ntid.x;
	shl.b32 	%r2, %r1, 2;
	mov.u32 	%r27, %ctaid.x;
	mov.u32 	%r28, %tid.x;
	mad.lo.s32 	%r122, %r2, %r27, %r28;
	add.s64 	%rd1, %rd37, 44;
	ld.param.u32 	%r4, [copy_part_1_param_0+44];
	setp.ge.u32 	%p1, %r122, %r4;
	@%p1 bra 	$L__BB8_35;
	ld.param.v2.u32 	{%r29, %r30}, [%rd1+-4];
	ld.param.v2.u32 	{%r31, %r32}, [%rd1+4];
	ld.param.u32 	%r10, [%rd1+16];
	cvt.u64.u32 	%rd2, %r32;
	ld.param.v2.u32 	{%r33, %r34}, [%rd1+12];
	ld.param.u32 	%r13, [%rd1+28];
	ld.param.v2.u32 	{%r35, %r36}, [%rd1+20];
	cvt.u64.u32 	%rd3, %r35;
	ld.param.v2.u32 	{%r37, %r38}, [%rd1+28];
	ld.param.u64 	%rd4, [%rd1+-44];
	ld.param.u64 	%rd5, [%rd1+-36];
	ld.param.u64 	%rd6, [%rd1+-28];
	ld.param.u32 	%r18, [%rd1+40];
	cvt.u64.u32 	%rd7, %r38;
	ld.param.v2.u32 	{%r39, %r40}, [%rd1+36];
	ld.param.u64 	%rd8, [%rd1+-20];
	mov.u32 	%r41, %nctaid.x;
	mul.lo.s32 	%r21, %r2, %r41;
$L__BB8_2:
	setp.ge.u32 	%p2, %r122, %r4;
	@%p2 bra 	$L__BB8_6;
	setp.ne.s32 	%p3, %r18, 0;
	setp.eq.s32 	%p4, %r31, 1;
	add.s32 	%r42, %r29, %r122;
	cvt.u64.u32 	%rd40, %r42;
	mul.lo.s64 	%rd41, %rd2, %rd40;
	shr.u64 	%rd42, %rd41, 32;
	cvt.u32.u64 	%r43, %rd42;
	shr.u32 	%r44, %r43, %r33;
	selp.b32 	%r45, %r42, %r44, %p4;
	mul.lo.s32 	%r46, %r31, %r45;
	sub.s32 	%r47, %r42, %r46;
	cvt.u64.u32 	%rd43, %r47;
	mul.lo.s64 	%rd44, %rd3, %rd43;
	shr.u64 	%rd45, %rd44, 32;
	cvt.u32.u64 	%r48, %rd45;
	shr.u32 	%r49, %r48, %r36;
	setp.eq.s32 	%p5, %r10, 1;
	selp.b32 	%r50, %r47, %r49, %p5;
	mul.lo.s32 	%r51, %r34, %r50;
	sub.s32 	%r52, %r47, %r51;
	cvt.u64.u32 	%rd46, %r50;
	mul.lo.s64 	%rd47, %rd7, %rd46;
	shr.u64 	%rd48, %rd47, 32;
	cvt.u32.u64 	%r53, %rd48;
	shr.u32 	%r54, %r53, %r39;
	setp.eq.s32 	%p6, %r13, 1;
	selp.b32 	%r55, %r50, %r54, %p6;
	mul.lo.s32 	%r56, %r37, %r55;
	sub.s32 	%r57, %r50, %r56;
	cvta.to.global.u64 	%rd49, %rd4;
	mul.wide.u32 	%rd50, %r55, 8;
	add.s64 	%rd51, %rd49, %rd50;
	mul.wide.u32 	%rd53, %r45, 4;
	add.s64 	%rd54, %rd37, %rd53;
	ld.param.u32 	%rd55, [%rd54+112];
	cvta.to.global.u64 	%rd56, %rd5;
	add.s64 	%rd57, %rd56, %rd50;
	ld.global.u64 	%rd58, [%rd57];
	mul.lo.s64 	%rd59, %rd58, %rd55;
	cvt.u64.u32 	%rd60, %r57;
	mul.lo.s64 	%rd61, %rd6, %rd60;
	cvt.u64.u32 	%rd62, %r52;
	add.s64 	%rd63, %rd59, %rd62;
	add.s64 	%rd64, %rd63, %rd61;
	ld.global.u64 	%rd65, [%rd51];
	add.s64 	%rd161, %rd65, %rd64;
	mov.u64 	%rd160, %rd161;
	@%p3 bra 	$L__BB8_5;
	cvt.u64.u32 	%rd66, %r122;
	add.s64 	%rd160, %rd8, %rd66;
$L__BB8_5:
	ld.global.cs.u8 %r58, [%rd160];
	cvt.u16.u32 	%rs18, %r58;
$L__BB8_6:
	add.s32 	%r23, %r1, %r122;
	setp.ge.u32 	%p7, %r23, %r4;
	@%p7 bra 	$L__BB8_10;
	setp.ne.s32 	%p8, %r18, 0;
	setp.eq.s32 	%p9, %r31, 1;
	add.s32 	%r59, %r29, %r23;
	cvt.u64.u32 	%rd68, %r59;
	mul.lo.s64 	%rd69, %rd2, %rd68;
	shr.u64 	%rd70, %rd69, 32;
	cvt.u32.u64 	%r60, %rd70;
	shr.u32 	%r61, %r60, %r33;
	selp.b32 	%r62, %r59, %r61, %p9;
	mul.lo.s32 	%r63, %r31, %r62;
	sub.s32 	%r64, %r59, %r63;
	cvt.u64.u32 	%rd71, %r64;
	mul.lo.s64 	%rd72, %rd3, %rd71;
	shr.u64 	%rd73, %rd72, 32;
	cvt.u32.u64 	%r65, %rd73;
	shr.u32 	%r66, %r65, %r36;
	setp.eq.s32 	%p10, %r10, 1;
	selp.b32 	%r67, %r64, %r66, %p10;
	mul.lo.s32 	%r68, %r34, %r67;
	sub.s32 	%r69, %r64, %r68;
	cvt.u64.u32 	%rd74, %r67;
	mul.lo.s64 	%rd75, %rd7, %rd74;
	shr.u64 	%rd76, %rd75, 32;
	cvt.u32.u64 	%r70, %rd76;
	shr.u32 	%r71, %r70, %r39;
	setp.eq.s32 	%p11, %r13, 1;
	selp.b32 	%r72, %r67, %r71, %p11;
	mul.lo.s32 	%r73, %r37, %r72;
	sub.s32 	%r74, %r67, %r73;
	cvta.to.global.u64 	%rd77, %rd4;
	mul.wide.u32 	%rd78, %r72, 8;
	add.s64 	%rd79, %rd77, %rd78;
	mul.wide.u32 	%rd81, %r62, 4;
	add.s64 	%rd82, %rd37, %rd81;
	ld.param.u32 	%rd83, [%rd82+112];
	cvta.to.global.u64 	%rd84, %rd5;
	add.s64 	%rd85, %rd84, %rd78;
	ld.global.u64 	%rd86, [%rd85];
	mul.lo.s64 	%rd87, %rd86, %rd83;
	cvt.u64.u32 	%rd88, %r74;
	mul.lo.s64 	%rd89, %rd6, %rd88;
	cvt.u64.u32 	%rd90, %r69;
	add.s64 	%rd91, %rd87, %rd90;
	add.s64 	%rd92, %rd91, %rd89;
	ld.global.u64 	%rd93, [%rd79];
	add.s64 	%rd163, %rd93, %rd92;
	mov.u64 	%rd162, %rd163;
	@%p8 bra 	$L__BB8_9;
	add.s32 	%r117, %r1, %r122;
	cvt.u64.u32 	%rd94, %r117;
	add.s64 	%rd162, %rd8, %rd94;
$L__BB8_9:
	ld.global.cs.u8 %r75, [%rd162];
	cvt.u16.u32 	%rs19, %r75;
$L__BB8_10:
	add.s32 	%r116, %r1, %r122;
	add.s32 	%r24, %r116, %r1;
	setp.ge.u32 	%p12, %r24, %r4;
	@%p12 bra 	$L__BB8_14;
	setp.ne.s32 	%p13, %r18, 0;
	setp.eq.s32 	%p14, %r31, 1;
	add.s32 	%r76, %r29, %r24;
	cvt.u64.u32 	%rd96, %r76;
	mul.lo.s64 	%rd97, %rd2, %rd96;
	shr.u64 	%rd98, %rd97, 32;
	cvt.u32.u64 	%r77, %rd98;
	shr.u32 	%r78, %r77, %r33;
	selp.b32 	%r79, %r76, %r78, %p14;
	mul.lo.s32 	%r80, %r31, %r79;
	sub.s32 	%r81, %r76, %r80;
	cvt.u64.u32 	%rd99, %r81;
	mul.lo.s64 	%rd100, %rd3, %rd99;
	shr.u64 	%rd101, %rd100, 32;
	cvt.u32.u64 	%r82, %rd101;
	shr.u32 	%r83, %r82, %r36;
	setp.eq.s32 	%p15, %r10, 1;
	selp.b32 	%r84, %r81, %r83, %p15;
	mul.lo.s32 	%r85, %r34, %r84;
	sub.s32 	%r86, %r81, %r85;
	cvt.u64.u32 	%rd102, %r84;
	mul.lo.s64 	%rd103, %rd7, %rd102;
	shr.u64 	%rd104, %rd103, 32;
	cvt.u32.u64 	%r87, %rd104;
	shr.u32 	%r88, %r87, %r39;
	setp.eq.s32 	%p16, %r13, 1;
	selp.b32 	%r89, %r84, %r88, %p16;
	mul.lo.s32 	%r90, %r37, %r89;
	sub.s32 	%r91, %r84, %r90;
	cvta.to.global.u64 	%rd105, %rd4;
	mul.wide.u32 	%rd106, %r89, 8;
	add.s64 	%rd107, %rd105, %rd106;
	mul.wide.u32 	%rd109, %r79, 4;
	add.s64 	%rd110, %rd37, %rd109;
	ld.param.u32 	%rd111, [%rd110+112];
	cvta.to.global.u64 	%rd112, %rd5;
	add.s64 	%rd113, %rd112, %rd106;
	ld.global.u64 	%rd114, [%rd113];
	mul.lo.s64 	%rd115, %rd114, %rd111;
	cvt.u64.u32 	%rd116, %r91;
	mul.lo.s64 	%rd117, %rd6, %rd116;
	cvt.u64.u32 	%rd118, %r86;
	add.s64 	%rd119, %rd115, %rd118;
	add.s64 	%rd120, %rd119, %rd117;
	ld.global.u64 	%rd121, [%rd107];
	add.s64 	%rd165, %rd121, %rd120;
	mov.u64 	%rd164, %rd165;
	@%p13 bra 	$L__BB8_13;
	add.s32 	%r121, %r1, %r122;
	add.s32 	%r120, %r121, %r1;
	cvt.u64.u32 	%rd122, %r120;
	add.s64 	%rd164, %rd8, %rd122;
$L__BB8_13:
	ld.global.cs.u8 %r92, [%rd164];
	cvt.u16.u32 	%rs20, %r92;
$L__BB8_14:
	add.s32 	%r119, %r1, %r122;
	add.s32 	%r118, %r119, %r1;
	add.s32 	%r25, %r118, %r1;
	setp.ge.u32 	%p17, %r25, %r4;
	@%p17 bra 	$L__BB8_18;
	setp.ne.s32 	%p18, %r18, 0;
	setp.eq.s32 	%p19, %r31, 1;
	add.s32 	%r93, %r29, %r25;
	cvt.u64.u32 	%rd124, %r93;
	mul.lo.s64 	%rd125, %rd2, %rd124;
	shr.u64 	%rd126, %rd125, 32;
	cvt.u32.u64 	%r94, %rd126;
	shr.u32 	%r95, %r94, %r33;
	selp.b32 	%r96, %r93, %r95, %p19;
	mul.lo.s32 	%r97, %r31, %r96;
	sub.s32 	%r98, %r93, %r97;
	cvt.u64.u32 	%rd127, %r98;
	mul.lo.s64 	%rd128, %rd3, %rd127;
	shr.u64 	%rd129, %rd128, 32;
	cvt.u32.u64 	%r99, %rd129;
	shr.u32 	%r100, %r99, %r36;
	setp.eq.s32 	%p20, %r10, 1;
	selp.b32 	%r101, %r98, %r100, %p20;
	mul.lo.s32 	%r102, %r34, %r101;
	sub.s32 	%r103, %r98, %r102;
	cvt.u64.u32 	%rd130, %r101;
	mul.lo.s64 	%rd131, %rd7, %rd130;
	shr.u64 	%rd132, %rd131, 32;
	cvt.u32.u64 	%r104, %rd132;
	shr.u32 	%r105, %r104, %r39;
	setp.eq.s32 	%p21, %r13, 1;
	selp.b32 	%r106, %r101, %r105, %p21;
	mul.lo.s32 	%r107, %r37, %r106;
	sub.s32 	%r108, %r101, %r107;
	cvta.to.global.u64 	%rd133, %rd4;
	mul.wide.u32 	%rd134, %r106, 8;
	add.s64 	%rd135, %rd133, %rd134;
	mul.wide.u32 	%rd137, %r96, 4;
	add.s64 	%rd138, %rd37, %rd137;
	ld.param.u32 	%rd139, [%rd138+112];
	cvta.to.global.u64 	%rd140, %rd5;
	add.s64 	%rd141, %rd140, %rd134;
	ld.global.u64 	%rd142, [%rd141];
	mul.lo.s64 	%rd143, %rd142, %rd139;
	cvt.u64.u32 	%rd144, %r108;
	mul.lo.s64 	%rd145, %rd6, %rd144;
	cvt.u64.u32 	%rd146, %r103;
	add.s64 	%rd147, %rd143, %rd146;
	add.s64 	%rd148, %rd147, %rd145;
	ld.global.u64 	%rd149, [%rd135];
	add.s64 	%rd167, %rd149, %rd148;
	mov.u64 	%rd166, %rd167;
	@%p18 bra 	$L__BB8_17;
	cvt.u64.u32 	%rd150, %r25;
	add.s64 	%rd166, %rd8, %rd150;
$L__BB8_17:
	ld.global.cs.u8 %r109, [%rd166];
	cvt.u16.u32 	%rs21, %r109;
$L__BB8_18:
	setp.ge.u32 	%p22, %r122, %r30;
	@%p22 bra 	$L__BB8_22;
	setp.eq.s32 	%p23, %r40, 0;
	mov.u64 	%rd168, %rd161;
	@%p23 bra 	$L__BB8_21;
	cvt.u64.u32 	%rd152, %r122;
	add.s64 	%rd168, %rd8, %rd152;
$L__BB8_21:
	st.u8 	[%rd168], %rs18;
$L__BB8_22:
	add.s32 	%r110, %r1, %r122;
	setp.ge.u32 	%p24, %r110, %r30;
	@%p24 bra 	$L__BB8_26;
	setp.eq.s32 	%p25, %r40, 0;
	mov.u64 	%rd169, %rd163;
	@%p25 bra 	$L__BB8_25;
	add.s32 	%r115, %r1, %r122;
	cvt.u64.u32 	%rd153, %r115;
	add.s64 	%rd169, %rd8, %rd153;
$L__BB8_25:
	st.u8 	[%rd169], %rs19;
$L__BB8_26:
	add.s32 	%r112, %r1, %r122;
	add.s32 	%r111, %r112, %r1;
	setp.ge.u32 	%p26, %r111, %r30;
	@%p26 bra 	$L__BB8_30;
	setp.eq.s32 	%p27, %r40, 0;
	mov.u64 	%rd170, %rd165;
	@%p27 bra 	$L__BB8_29;
	add.s32 	%r114, %r1, %r122;
	add.s32 	%r113, %r114, %r1;
	cvt.u64.u32 	%rd154, %r113;
	add.s64 	%rd170, %rd8, %rd154;
$L__BB8_29:
	st.u8 	[%rd170], %rs20;
$L__BB8_30:
	setp.ge.u32 	%p28, %r25, %r30;
	@%p28 bra 	$L__BB8_34;
	setp.eq.s32 	%p29, %r40, 0;
	mov.u64 	%rd171, %rd167;
	@%p29 bra 	$L__BB8_33;
	cvt.u64.u32 	%rd155, %r25;
	add.s64 	%rd171, %rd8, %rd155;
$L__BB8_33:
	st.u8 	[%rd171], %rs21;
$L__BB8_34:
	add.s32 	%r122, %r122, %r21;
	setp.lt.u32 	%p30, %r122, %r30;
	@%p30 bra 	$L__BB8_2;
$L__BB8_35:
	ret;
}
.visible .entry copy_part_summed_16(
	.param .align 8 .b8 copy_part_summed_16_param_0[3712]
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<45>;
	.reg .b32 	%r<250>;
	.reg .b64 	%rd<312>;
	mov.b64 	%rd49, copy_part_summed_16_param_0;
	mov.u32 	%r1, %ntid.x;
	shl.b32 	%r2, %r1, 2;
	mov.u32 	%r77, %ctaid.x;
	mov.u32 	%r78, %tid.x;
	mad.lo.s32 	%r233, %r2, %r77, %r78;
	add.s64 	%rd1, %rd49, 44;
	ld.param.u32 	%r4, [copy_part_summed_16_param_0+44];
	mov.u64 	%rd304, 0;
	setp.ge.u32 	%p1, %r233, %r4;
	@%p1 bra 	$L__BB9_39;
	ld.param.v2.u32 	{%r80, %r81}, [%rd1+-4];
	mov.u64 	%rd304, 0;
	ld.param.v2.u32 	{%r82, %r83}, [%rd1+4];
	ld.param.u32 	%r10, [%rd1+16];
	cvt.u64.u32 	%rd2, %r83;
	ld.param.v2.u32 	{%r84, %r85}, [%rd1+12];
	ld.param.u32 	%r14, [%rd1+28];
	ld.param.v2.u32 	{%r86, %r87}, [%rd1+20];
	cvt.u64.u32 	%rd3, %r86;
	ld.param.v2.u32 	{%r88, %r89}, [%rd1+28];
	ld.param.u64 	%rd4, [%rd1+-44];
	ld.param.u64 	%rd5, [%rd1+-36];
	ld.param.u64 	%rd6, [%rd1+-28];
	ld.param.u32 	%r19, [%rd1+40];
	cvt.u64.u32 	%rd7, %r89;
	ld.param.v2.u32 	{%r90, %r91}, [%rd1+36];
	ld.param.u64 	%rd8, [%rd1+-20];
	ld.param.u64 	%rd9, [%rd1+-12];
	mov.u32 	%r92, %nctaid.x;
	mul.lo.s32 	%r23, %r2, %r92;
$L__BB9_2:
	setp.ge.u32 	%p2, %r233, %r4;
	@%p2 bra 	$L__BB9_6;
	setp.ne.s32 	%p3, %r19, 0;
	setp.eq.s32 	%p4, %r82, 1;
	add.s32 	%r93, %r80, %r233;
	cvt.u64.u32 	%rd54, %r93;
	mul.lo.s64 	%rd55, %rd2, %rd54;
	shr.u64 	%rd56, %rd55, 32;
	cvt.u32.u64 	%r94, %rd56;
	shr.u32 	%r95, %r94, %r84;
	selp.b32 	%r96, %r93, %r95, %p4;
	mul.lo.s32 	%r97, %r82, %r96;
	sub.s32 	%r98, %r93, %r97;
	cvt.u64.u32 	%rd57, %r98;
	mul.lo.s64 	%rd58, %rd3, %rd57;
	shr.u64 	%rd59, %rd58, 32;
	cvt.u32.u64 	%r99, %rd59;
	shr.u32 	%r100, %r99, %r87;
	setp.eq.s32 	%p5, %r10, 1;
	selp.b32 	%r101, %r98, %r100, %p5;
	mul.lo.s32 	%r102, %r85, %r101;
	sub.s32 	%r103, %r98, %r102;
	cvt.u64.u32 	%rd60, %r101;
	mul.lo.s64 	%rd61, %rd7, %rd60;
	shr.u64 	%rd62, %rd61, 32;
	cvt.u32.u64 	%r104, %rd62;
	shr.u32 	%r105, %r104, %r90;
	setp.eq.s32 	%p6, %r14, 1;
	selp.b32 	%r106, %r101, %r105, %p6;
	mul.lo.s32 	%r107, %r88, %r106;
	sub.s32 	%r108, %r101, %r107;
	cvta.to.global.u64 	%rd63, %rd4;
	mul.wide.u32 	%rd64, %r106, 8;
	add.s64 	%rd65, %rd63, %rd64;
	mul.wide.u32 	%rd67, %r96, 4;
	add.s64 	%rd68, %rd49, %rd67;
	ld.param.u32 	%rd69, [%rd68+112];
	cvta.to.global.u64 	%rd70, %rd5;
	add.s64 	%rd71, %rd70, %rd64;
	ld.global.u64 	%rd72, [%rd71];
	mul.lo.s64 	%rd73, %rd72, %rd69;
	cvt.u64.u32 	%rd74, %r108;
	mul.lo.s64 	%rd75, %rd6, %rd74;
	mul.wide.u32 	%rd76, %r103, 16;
	add.s64 	%rd77, %rd73, %rd76;
	add.s64 	%rd78, %rd77, %rd75;
	ld.global.u64 	%rd79, [%rd65];
	add.s64 	%rd296, %rd79, %rd78;
	mov.u64 	%rd295, %rd296;
	@%p3 bra 	$L__BB9_5;
	mul.wide.u32 	%rd80, %r233, 16;
	add.s64 	%rd295, %rd8, %rd80;
$L__BB9_5:
	ld.global.cs.v4.u32 {%r237,%r236,%r235,%r234}, [%rd295];
$L__BB9_6:
	add.s32 	%r49, %r1, %r233;
	setp.ge.u32 	%p7, %r49, %r4;
	@%p7 bra 	$L__BB9_10;
	add.s32 	%r213, %r1, %r233;
	setp.ne.s32 	%p8, %r19, 0;
	setp.eq.s32 	%p9, %r82, 1;
	add.s32 	%r113, %r80, %r213;
	cvt.u64.u32 	%rd82, %r113;
	mul.lo.s64 	%rd83, %rd2, %rd82;
	shr.u64 	%rd84, %rd83, 32;
	cvt.u32.u64 	%r114, %rd84;
	shr.u32 	%r115, %r114, %r84;
	selp.b32 	%r116, %r113, %r115, %p9;
	mul.lo.s32 	%r117, %r82, %r116;
	sub.s32 	%r118, %r113, %r117;
	cvt.u64.u32 	%rd85, %r118;
	mul.lo.s64 	%rd86, %rd3, %rd85;
	shr.u64 	%rd87, %rd86, 32;
	cvt.u32.u64 	%r119, %rd87;
	shr.u32 	%r120, %r119, %r87;
	setp.eq.s32 	%p10, %r10, 1;
	selp.b32 	%r121, %r118, %r120, %p10;
	mul.lo.s32 	%r122, %r85, %r121;
	sub.s32 	%r123, %r118, %r122;
	cvt.u64.u32 	%rd88, %r121;
	mul.lo.s64 	%rd89, %rd7, %rd88;
	shr.u64 	%rd90, %rd89, 32;
	cvt.u32.u64 	%r124, %rd90;
	shr.u32 	%r125, %r124, %r90;
	setp.eq.s32 	%p11, %r14, 1;
	selp.b32 	%r126, %r121, %r125, %p11;
	mul.lo.s32 	%r127, %r88, %r126;
	sub.s32 	%r128, %r121, %r127;
	cvta.to.global.u64 	%rd91, %rd4;
	mul.wide.u32 	%rd92, %r126, 8;
	add.s64 	%rd93, %rd91, %rd92;
	mul.wide.u32 	%rd95, %r116, 4;
	add.s64 	%rd96, %rd49, %rd95;
	ld.param.u32 	%rd97, [%rd96+112];
	cvta.to.global.u64 	%rd98, %rd5;
	add.s64 	%rd99, %rd98, %rd92;
	ld.global.u64 	%rd100, [%rd99];
	mul.lo.s64 	%rd101, %rd100, %rd97;
	cvt.u64.u32 	%rd102, %r128;
	mul.lo.s64 	%rd103, %rd6, %rd102;
	mul.wide.u32 	%rd104, %r123, 16;
	add.s64 	%rd105, %rd101, %rd104;
	add.s64 	%rd106, %rd105, %rd103;
	ld.global.u64 	%rd107, [%rd93];
	add.s64 	%rd298, %rd107, %rd106;
	mov.u64 	%rd297, %rd298;
	@%p8 bra 	$L__BB9_9;
	add.s32 	%r214, %r1, %r233;
	mul.wide.u32 	%rd108, %r214, 16;
	add.s64 	%rd297, %rd8, %rd108;
$L__BB9_9:
	ld.global.cs.v4.u32 {%r241,%r240,%r239,%r238}, [%rd297];
$L__BB9_10:
	add.s32 	%r212, %r1, %r233;
	add.s32 	%r58, %r212, %r1;
	setp.ge.u32 	%p12, %r58, %r4;
	@%p12 bra 	$L__BB9_14;
	setp.ne.s32 	%p13, %r19, 0;
	setp.eq.s32 	%p14, %r82, 1;
	add.s32 	%r133, %r80, %r58;
	cvt.u64.u32 	%rd110, %r133;
	mul.lo.s64 	%rd111, %rd2, %rd110;
	shr.u64 	%rd112, %rd111, 32;
	cvt.u32.u64 	%r134, %rd112;
	shr.u32 	%r135, %r134, %r84;
	selp.b32 	%r136, %r133, %r135, %p14;
	mul.lo.s32 	%r137, %r82, %r136;
	sub.s32 	%r138, %r133, %r137;
	cvt.u64.u32 	%rd113, %r138;
	mul.lo.s64 	%rd114, %rd3, %rd113;
	shr.u64 	%rd115, %rd114, 32;
	cvt.u32.u64 	%r139, %rd115;
	shr.u32 	%r140, %r139, %r87;
	setp.eq.s32 	%p15, %r10, 1;
	selp.b32 	%r141, %r138, %r140, %p15;
	mul.lo.s32 	%r142, %r85, %r141;
	sub.s32 	%r143, %r138, %r142;
	cvt.u64.u32 	%rd116, %r141;
	mul.lo.s64 	%rd117, %rd7, %rd116;
	shr.u64 	%rd118, %rd117, 32;
	cvt.u32.u64 	%r144, %rd118;
	shr.u32 	%r145, %r144, %r90;
	setp.eq.s32 	%p16, %r14, 1;
	selp.b32 	%r146, %r141, %r145, %p16;
	mul.lo.s32 	%r147, %r88, %r146;
	sub.s32 	%r148, %r141, %r147;
	cvta.to.global.u64 	%rd119, %rd4;
	mul.wide.u32 	%rd120, %r146, 8;
	add.s64 	%rd121, %rd119, %rd120;
	mul.wide.u32 	%rd123, %r136, 4;
	add.s64 	%rd124, %rd49, %rd123;
	ld.param.u32 	%rd125, [%rd124+112];
	cvta.to.global.u64 	%rd126, %rd5;
	add.s64 	%rd127, %rd126, %rd120;
	ld.global.u64 	%rd128, [%rd127];
	mul.lo.s64 	%rd129, %rd128, %rd125;
	cvt.u64.u32 	%rd130, %r148;
	mul.lo.s64 	%rd131, %rd6, %rd130;
	mul.wide.u32 	%rd132, %r143, 16;
	add.s64 	%rd133, %rd129, %rd132;
	add.s64 	%rd134, %rd133, %rd131;
	ld.global.u64 	%rd135, [%rd121];
	add.s64 	%rd300, %rd135, %rd134;
	mov.u64 	%rd299, %rd300;
	@%p13 bra 	$L__BB9_13;
	mul.wide.u32 	%rd136, %r58, 16;
	add.s64 	%rd299, %rd8, %rd136;
$L__BB9_13:
	ld.global.cs.v4.u32 {%r245,%r244,%r243,%r242}, [%rd299];
$L__BB9_14:
	add.s32 	%r67, %r58, %r1;
	setp.ge.u32 	%p17, %r67, %r4;
	@%p17 bra 	$L__BB9_18;
	setp.ne.s32 	%p18, %r19, 0;
	setp.eq.s32 	%p19, %r82, 1;
	add.s32 	%r153, %r80, %r67;
	cvt.u64.u32 	%rd138, %r153;
	mul.lo.s64 	%rd139, %rd2, %rd138;
	shr.u64 	%rd140, %rd139, 32;
	cvt.u32.u64 	%r154, %rd140;
	shr.u32 	%r155, %r154, %r84;
	selp.b32 	%r156, %r153, %r155, %p19;
	mul.lo.s32 	%r157, %r82, %r156;
	sub.s32 	%r158, %r153, %r157;
	cvt.u64.u32 	%rd141, %r158;
	mul.lo.s64 	%rd142, %rd3, %rd141;
	shr.u64 	%rd143, %rd142, 32;
	cvt.u32.u64 	%r159, %rd143;
	shr.u32 	%r160, %r159, %r87;
	setp.eq.s32 	%p20, %r10, 1;
	selp.b32 	%r161, %r158, %r160, %p20;
	mul.lo.s32 	%r162, %r85, %r161;
	sub.s32 	%r163, %r158, %r162;
	cvt.u64.u32 	%rd144, %r161;
	mul.lo.s64 	%rd145, %rd7, %rd144;
	shr.u64 	%rd146, %rd145, 32;
	cvt.u32.u64 	%r164, %rd146;
	shr.u32 	%r165, %r164, %r90;
	setp.eq.s32 	%p21, %r14, 1;
	selp.b32 	%r166, %r161, %r165, %p21;
	mul.lo.s32 	%r167, %r88, %r166;
	sub.s32 	%r168, %r161, %r167;
	cvta.to.global.u64 	%rd147, %rd4;
	mul.wide.u32 	%rd148, %r166, 8;
	add.s64 	%rd149, %rd147, %rd148;
	mul.wide.u32 	%rd151, %r156, 4;
	add.s64 	%rd152, %rd49, %rd151;
	ld.param.u32 	%rd153, [%rd152+112];
	cvta.to.global.u64 	%rd154, %rd5;
	add.s64 	%rd155, %rd154, %rd148;
	ld.global.u64 	%rd156, [%rd155];
	mul.lo.s64 	%rd157, %rd156, %rd153;
	cvt.u64.u32 	%rd158, %r168;
	mul.lo.s64 	%rd159, %rd6, %rd158;
	mul.wide.u32 	%rd160, %r163, 16;
	add.s64 	%rd161, %rd157, %rd160;
	add.s64 	%rd162, %rd161, %rd159;
	ld.global.u64 	%rd163, [%rd149];
	add.s64 	%rd302, %rd163, %rd162;
	mov.u64 	%rd301, %rd302;
	@%p18 bra 	$L__BB9_17;
	mul.wide.u32 	%rd164, %r67, 16;
	add.s64 	%rd301, %rd8, %rd164;
$L__BB9_17:
	ld.global.cs.v4.u32 {%r249,%r248,%r247,%r246}, [%rd301];
$L__BB9_18:
	setp.ge.u32 	%p22, %r233, %r81;
	@%p22 bra 	$L__BB9_23;
	setp.eq.s32 	%p23, %r91, 0;
	@%p23 bra 	$L__BB9_21;
	mul.wide.u32 	%rd166, %r233, 16;
	add.s64 	%rd303, %rd8, %rd166;
	bra.uni 	$L__BB9_22;
$L__BB9_21:
	mov.u64 	%rd303, %rd296;
$L__BB9_22:
	st.v4.u32 	[%rd303], {%r237, %r236, %r235, %r234};
	mul.wide.u32 	%rd167, %r233, 2;
	add.s64 	%rd168, %rd9, %rd167;
	cvt.u64.u32 	%rd169, %r236;
	cvt.u64.u32 	%rd170, %r237;
	bfi.b64 	%rd171, %rd169, %rd170, 32, 32;
	mul.lo.s64 	%rd172, %rd168, -7046029254386353131;
	add.s64 	%rd173, %rd172, -7046029254386353131;
	xor.b64  	%rd174, %rd171, %rd173;
	and.b64  	%rd175, %rd174, 4294967295;
	shr.u64 	%rd176, %rd174, 32;
	mul.lo.s64 	%rd177, %rd175, %rd176;
	{
	.reg .b64 %lhs;
	.reg .b64 %rhs;
	shl.b64 	%lhs, %rd174, 32;
	shr.b64 	%rhs, %rd174, 32;
	add.u64 	%rd178, %lhs, %rhs;
	}
	cvt.u64.u32 	%rd179, %r234;
	cvt.u64.u32 	%rd180, %r235;
	bfi.b64 	%rd181, %rd179, %rd180, 32, 32;
	add.s64 	%rd182, %rd172, 4354685564936845354;
	xor.b64  	%rd183, %rd181, %rd182;
	and.b64  	%rd184, %rd183, 4294967295;
	shr.u64 	%rd185, %rd183, 32;
	mul.lo.s64 	%rd186, %rd184, %rd185;
	{
	.reg .b64 %lhs;
	.reg .b64 %rhs;
	shl.b64 	%lhs, %rd183, 32;
	shr.b64 	%rhs, %rd183, 32;
	add.u64 	%rd187, %lhs, %rhs;
	}
	add.s64 	%rd188, %rd178, %rd304;
	add.s64 	%rd189, %rd188, %rd177;
	add.s64 	%rd190, %rd189, %rd187;
	add.s64 	%rd304, %rd190, %rd186;
$L__BB9_23:
	add.s32 	%r209, %r1, %r233;
	setp.ge.u32 	%p24, %r209, %r81;
	@%p24 bra 	$L__BB9_28;
	setp.eq.s32 	%p25, %r91, 0;
	@%p25 bra 	$L__BB9_26;
	add.s32 	%r215, %r1, %r233;
	mul.wide.u32 	%rd191, %r215, 16;
	add.s64 	%rd305, %rd8, %rd191;
	bra.uni 	$L__BB9_27;
$L__BB9_26:
	mov.u64 	%rd305, %rd298;
$L__BB9_27:
	add.s32 	%r216, %r1, %r233;
	st.v4.u32 	[%rd305], {%r241, %r240, %r239, %r238};
	mul.wide.u32 	%rd192, %r216, 2;
	add.s64 	%rd193, %rd9, %rd192;
	cvt.u64.u32 	%rd194, %r240;
	cvt.u64.u32 	%rd195, %r241;
	bfi.b64 	%rd196, %rd194, %rd195, 32, 32;
	mul.lo.s64 	%rd197, %rd193, -7046029254386353131;
	add.s64 	%rd198, %rd197, -7046029254386353131;
	xor.b64  	%rd199, %rd196, %rd198;
	and.b64  	%rd200, %rd199, 4294967295;
	shr.u64 	%rd201, %rd199, 32;
	mul.lo.s64 	%rd202, %rd200, %rd201;
	{
	.reg .b64 %lhs;
	.reg .b64 %rhs;
	shl.b64 	%lhs, %rd199, 32;
	shr.b64 	%rhs, %rd199, 32;
	add.u64 	%rd203, %lhs, %rhs;
	}
	cvt.u64.u32 	%rd204, %r238;
	cvt.u64.u32 	%rd205, %r239;
	bfi.b64 	%rd206, %rd204, %rd205, 32, 32;
	add.s64 	%rd207, %rd197, 4354685564936845354;
	xor.b64  	%rd208, %rd206, %rd207;
	and.b64  	%rd209, %rd208, 4294967295;
	shr.u64 	%rd210, %rd208, 32;
	mul.lo.s64 	%rd211, %rd209, %rd210;
	{
	.reg .b64 %lhs;
	.reg .b64 %rhs;
	shl.b64 	%lhs, %rd208, 32;
	shr.b64 	%rhs, %rd208, 32;
	add.u64 	%rd212, %lhs, %rhs;
	}
	add.s64 	%rd213, %rd203, %rd304;
	add.s64 	%rd214, %rd213, %rd202;
	add.s64 	%rd215, %rd214, %rd212;
	add.s64 	%rd304, %rd215, %rd211;
$L__BB9_28:
	setp.ge.u32 	%p26, %r58, %r81;
	@%p26 bra 	$L__BB9_33;
	setp.eq.s32 	%p27, %r91, 0;
	@%p27 bra 	$L__BB9_31;
	mul.wide.u32 	%rd216, %r58, 16;
	add.s64 	%rd307, %rd8, %rd216;
	bra.uni 	$L__BB9_32;
$L__BB9_31:
	mov.u64 	%rd307, %rd300;
$L__BB9_32:
	st.v4.u32 	[%rd307], {%r245, %r244, %r243, %r242};
	mul.wide.u32 	%rd217, %r58, 2;
	add.s64 	%rd218, %rd9, %rd217;
	cvt.u64.u32 	%rd219, %r244;
	cvt.u64.u32 	%rd220, %r245;
	bfi.b64 	%rd221, %rd219, %rd220, 32, 32;
	mul.lo.s64 	%rd222, %rd218, -7046029254386353131;
	add.s64 	%rd223, %rd222, -7046029254386353131;
	xor.b64  	%rd224, %rd221, %rd223;
	and.b64  	%rd225, %rd224, 4294967295;
	shr.u64 	%rd226, %rd224, 32;
	mul.lo.s64 	%rd227, %rd225, %rd226;
	{
	.reg .b64 %lhs;
	.reg .b64 %rhs;
	shl.b64 	%lhs, %rd224, 32;
	shr.b64 	%rhs, %rd224, 32;
	add.u64 	%rd228, %lhs, %rhs;
	}
	cvt.u64.u32 	%rd229, %r242;
	cvt.u64.u32 	%rd230, %r243;
	bfi.b64 	%rd231, %rd229, %rd230, 32, 32;
	add.s64 	%rd232, %rd222, 4354685564936845354;
	xor.b64  	%rd233, %rd231, %rd232;
	and.b64  	%rd234, %rd233, 4294967295;
	shr.u64 	%rd235, %rd233, 32;
	mul.lo.s64 	%rd236, %rd234, %rd235;
	{
	.reg .b64 %lhs;
	.reg .b64 %rhs;
	shl.b64 	%lhs, %rd233, 32;
	shr.b64 	%rhs, %rd233, 32;
	add.u64 	%rd237, %lhs, %rhs;
	}
	add.s64 	%rd238, %rd228, %rd304;
	add.s64 	%rd239, %rd238, %rd227;
	add.s64 	%rd240, %rd239, %rd237;
	add.s64 	%rd304, %rd240, %rd236;
$L__BB9_33:
	setp.ge.u32 	%p28, %r67, %r81;
	@%p28 bra 	$L__BB9_38;
	setp.eq.s32 	%p29, %r91, 0;
	@%p29 bra 	$L__BB9_36;
	mul.wide.u32 	%rd241, %r67, 16;
	add.s64 	%rd309, %rd8, %rd241;
	bra.uni 	$L__BB9_37;
$L__BB9_36:
	mov.u64 	%rd309, %rd302;
$L__BB9_37:
	st.v4.u32 	[%rd309], {%r249, %r248, %r247, %r246};
	mul.wide.u32 	%rd242, %r67, 2;
	add.s64 	%rd243, %rd9, %rd242;
	cvt.u64.u32 	%rd244, %r248;
	cvt.u64.u32 	%rd245, %r249;
	bfi.b64 	%rd246, %rd244, %rd245, 32, 32;
	mul.lo.s64 	%rd247, %rd243, -7046029254386353131;
	add.s64 	%rd248, %rd247, -7046029254386353131;
	xor.b64  	%rd249, %rd246, %rd248;
	and.b64  	%rd250, %rd249, 4294967295;
	shr.u64 	%rd251, %rd249, 32;
	mul.lo.s64 	%rd252, %rd250, %rd251;
	{
	.reg .b64 %lhs;
	.reg .b64 %rhs;
	shl.b64 	%lhs, %rd249, 32;
	shr.b64 	%rhs, %rd249, 32;
	add.u64 	%rd253, %lhs, %rhs;
	}
	cvt.u64.u32 	%rd254, %r246;
	cvt.u64.u32 	%rd255, %r247;
	bfi.b64 	%rd256, %rd254, %rd255, 32, 32;
	add.s64 	%rd257, %rd247, 4354685564936845354;
	xor.b64  	%rd258, %rd256, %rd257;
	and.b64  	%rd259, %rd258, 4294967295;
	shr.u64 	%rd260, %rd258, 32;
	mul.lo.s64 	%rd261, %rd259, %rd260;
	{
	.reg .b64 %lhs;
	.reg .b64 %rhs;
	shl.b64 	%lhs, %rd258, 32;
	shr.b64 	%rhs, %rd258, 32;
	add.u64 	%rd262, %lhs, %rhs;
	}
	add.s64 	%rd263, %rd253, %rd304;
	add.s64 	%rd264, %rd263, %rd252;
	add.s64 	%rd265, %rd264, %rd262;
	add.s64 	%rd304, %rd265, %rd261;
$L__BB9_38:
	add.s32 	%r233, %r233, %r23;
	setp.lt.u32 	%p30, %r233, %r81;
	@%p30 bra 	$L__BB9_2;
$L__BB9_39:
	mov.u32 	%r210, %tid.x;
	setp.ne.s32 	%p31, %r210, 0;
	@%p31 bra 	$L__BB9_41;
	mov.u64 	%rd266, 0;
	st.shared.u64 	[_ZZN46_INTERNAL_00000000_15_copy_kernels_cu_6d2194a748_GLOBAL__N__00000000_15_copy_kernels_cu_6d2194a711add_to_cellERKN7kvferry7SumIntoEmE5total], %rd266;
$L__BB9_41:
	mov.u32 	%r211, %tid.x;
	bar.sync 	0;
	mov.b64 {%r174,%r175}, %rd304;
	mov.u32 	%r194, 2;
	mov.u32 	%r195, 31;
	mov.u32 	%r196, 16;
	mov.u32 	%r197, -1;
	shfl.sync.down.b32 	%r177|%p32, %r175, %r196, %r195, %r197;
	shfl.sync.down.b32 	%r176|%p33, %r174, %r196, %r195, %r197;
	mov.b64 %rd268, {%r176,%r177};
	add.s64 	%rd269, %rd268, %rd304;
	mov.b64 {%r178,%r179}, %rd269;
	mov.u32 	%r198, 8;
	shfl.sync.down.b32 	%r181|%p34, %r179, %r198, %r195, %r197;
	shfl.sync.down.b32 	%r180|%p35, %r178, %r198, %r195, %r197;
	mov.b64 %rd270, {%r180,%r181};
	add.s64 	%rd271, %rd270, %rd269;
	mov.b64 {%r182,%r183}, %rd271;
	mov.u32 	%r199, 4;
	shfl.sync.down.b32 	%r185|%p36, %r183, %r199, %r195, %r197;
	shfl.sync.down.b32 	%r184|%p37, %r182, %r199, %r195, %r197;
	mov.b64 %rd272, {%r184,%r185};
	add.s64 	%rd273, %rd272, %rd271;
	mov.b64 {%r186,%r187}, %rd273;
	shfl.sync.down.b32 	%r189|%p38, %r187, %r194, %r195, %r197;
	shfl.sync.down.b32 	%r188|%p39, %r186, %r194, %r195, %r197;
	mov.b64 %rd274, {%r188,%r189};
	add.s64 	%rd275, %rd274, %rd273;
	mov.b64 {%r190,%r191}, %rd275;
	mov.u32 	%r200, 1;
	shfl.sync.down.b32 	%r193|%p40, %r191, %r200, %r195, %r197;
	shfl.sync.down.b32 	%r192|%p41, %r190, %r200, %r195, %r197;
	mov.b64 %rd276, {%r192,%r193};
	add.s64 	%rd48, %rd276, %rd275;
	and.b32  	%r202, %r211, 31;
	setp.ne.s32 	%p42, %r202, 0;
	@%p42 bra 	$L__BB9_43;
	mov.u32 	%r203, _ZZN46_INTERNAL_00000000_15_copy_kernels_cu_6d2194a748_GLOBAL__N__00000000_15_copy_kernels_cu_6d2194a711add_to_cellERKN7kvferry7SumIntoEmE5total;
	atom.shared.add.u64 	%rd277, [%r203], %rd48;
$L__BB9_43:
	bar.sync 	0;
	@%p31 bra 	$L__BB9_46;
	ld.param.u64 	%rd279, [%rd49+88];
	cvta.to.global.u64 	%rd280, %rd279;
	ld.shared.u64 	%rd281, [_ZZN46_INTERNAL_00000000_15_copy_kernels_cu_6d2194a748_GLOBAL__N__00000000_15_copy_kernels_cu_6d2194a711add_to_cellERKN7kvferry7SumIntoEmE5total];
	atom.global.add.u64 	%rd282, [%rd280], %rd281;
	membar.gl;
	add.s64 	%rd283, %rd280, 8;
	atom.global.add.u32 	%r205, [%rd283], 1;
	add.s32 	%r206, %r205, 1;
	ld.param.u32 	%r207, [%rd49+104];
	setp.ne.s32 	%p44, %r206, %r207;
	@%p44 bra 	$L__BB9_46;
	membar.gl;
	ld.param.u64 	%rd285, [%rd49+88];
	cvta.to.global.u64 	%rd286, %rd285;
	atom.global.exch.b64 	%rd287, [%rd286], 0;
	ld.param.u64 	%rd288, [%rd49+96];
	cvta.to.global.u64 	%rd289, %rd288;
	st.global.u64 	[%rd289], %rd287;
	mov.u32 	%r208, 0;
	st.global.u32 	[%rd286+8], %r208;
$L__BB9_46:
	ret;
}
.visible .entry sum_part(
	.param .align 8 .b8 sum_part_param_0[40]
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<26>;
	.reg .b32 	%r<77>;
	.reg .b64 	%rd<121>;
	mov.b64 	%rd26, sum_part_param_0;
	add.s64 	%rd1, %rd26, 8;
	ld.param.u64 	%rd2, [sum_part_param_0+8];
	mov.u64 	%rd120, 0;
	add.s64 	%rd29, %rd2, 7;
	shr.u64 	%rd30, %rd29, 3;
	mov.u32 	%r12, %ntid.x;
	ld.param.u64 	%rd3, [sum_part_param_0];
	mov.u32 	%r13, %ctaid.x;
	mul.wide.u32 	%rd31, %r13, %r12;
	mov.u32 	%r14, %tid.x;
	cvt.u64.u32 	%rd32, %r14;
	add.s64 	%rd4, %rd31, %rd32;
	setp.ge.u64 	%p1, %rd4, %rd30;
	@%p1 bra 	$L__BB10_13;
	ld.param.u64 	%rd5, [%rd1+-8];
	mov.u64 	%rd113, 0;
	and.b64  	%rd35, %rd5, 7;
	mov.u32 	%r15, %nctaid.x;
	mov.u64 	%rd114, %rd4;
	mov.u64 	%rd120, %rd113;
$L__BB10_2:
	setp.ne.s64 	%p2, %rd35, 0;
	mul.wide.u32 	%rd36, %r15, %r12;
	mul.lo.s64 	%rd37, %rd36, %rd113;
	shl.b64 	%rd38, %rd37, 3;
	shl.b64 	%rd42, %rd4, 3;
	not.b64 	%rd43, %rd2;
	add.s64 	%rd44, %rd42, %rd43;
	add.s64 	%rd45, %rd44, %rd38;
	max.u64 	%rd46, %rd45, -9;
	cvt.u32.u64 	%r1, %rd46;
	shl.b64 	%rd9, %rd114, 3;
	sub.s64 	%rd47, %rd2, %rd9;
	min.u64 	%rd48, %rd47, 8;
	cvt.u32.u64 	%r2, %rd48;
	setp.ne.s32 	%p3, %r2, 8;
	or.pred  	%p4, %p3, %p2;
	@%p4 bra 	$L__BB10_4;
	bra.uni 	$L__BB10_3;
$L__BB10_4:
	setp.eq.s32 	%p5, %r2, 0;
	mov.u64 	%rd119, 0;
	@%p5 bra 	$L__BB10_12;
	not.b32 	%r20, %r1;
	and.b32  	%r3, %r20, 3;
	mov.u32 	%r21, -2;
	sub.s32 	%r22, %r21, %r1;
	setp.lt.u32 	%p6, %r22, 3;
	mov.u64 	%rd119, 0;
	mov.u32 	%r76, 0;
	@%p6 bra 	$L__BB10_8;
	add.s32 	%r26, %r3, %r1;
	add.s32 	%r4, %r26, 1;
	cvta.to.global.u64 	%rd11, %rd3;
	mov.u64 	%rd119, 0;
	mov.u32 	%r73, 0;
	mov.u32 	%r74, 24;
	mov.u32 	%r76, %r73;
$L__BB10_7:
	cvt.u64.u32 	%rd55, %r76;
	add.s64 	%rd56, %rd9, %rd55;
	add.s64 	%rd57, %rd11, %rd56;
	ld.global.u8 	%rd58, [%rd57];
	shl.b64 	%rd59, %rd58, %r73;
	or.b64  	%rd60, %rd59, %rd119;
	ld.global.u8 	%rd61, [%rd57+1];
	add.s32 	%r27, %r73, 8;
	shl.b64 	%rd62, %rd61, %r27;
	or.b64  	%rd63, %rd62, %rd60;
	ld.global.u8 	%rd64, [%rd57+2];
	add.s32 	%r28, %r74, -8;
	shl.b64 	%rd65, %rd64, %r28;
	or.b64  	%rd66, %rd65, %rd63;
	ld.global.u8 	%rd67, [%rd57+3];
	shl.b64 	%rd68, %rd67, %r74;
	or.b64  	%rd119, %rd68, %rd66;
	add.s32 	%r74, %r74, 32;
	add.s32 	%r73, %r73, 32;
	add.s32 	%r76, %r76, 4;
	add.s32 	%r29, %r4, %r76;
	setp.ne.s32 	%p7, %r29, 0;
	@%p7 bra 	$L__BB10_7;
$L__BB10_8:
	setp.eq.s32 	%p8, %r3, 0;
	@%p8 bra 	$L__BB10_12;
	cvt.u64.u32 	%rd69, %r76;
	add.s64 	%rd70, %rd9, %rd69;
	cvta.to.global.u64 	%rd71, %rd3;
	add.s64 	%rd16, %rd71, %rd70;
	ld.global.u8 	%rd72, [%rd16];
	shl.b32 	%r30, %r76, 3;
	shl.b64 	%rd73, %rd72, %r30;
	or.b64  	%rd119, %rd73, %rd119;
	setp.eq.s32 	%p9, %r3, 1;
	@%p9 bra 	$L__BB10_12;
	ld.global.u8 	%rd74, [%rd16+1];
	add.s32 	%r32, %r30, 8;
	shl.b64 	%rd75, %rd74, %r32;
	or.b64  	%rd119, %rd75, %rd119;
	setp.eq.s32 	%p10, %r3, 2;
	@%p10 bra 	$L__BB10_12;
	ld.global.u8 	%rd76, [%rd16+2];
	add.s32 	%r34, %r30, 16;
	shl.b64 	%rd77, %rd76, %r34;
	or.b64  	%rd119, %rd77, %rd119;
	bra.uni 	$L__BB10_12;
$L__BB10_3:
	cvta.to.global.u64 	%rd49, %rd3;
	add.s64 	%rd50, %rd49, %rd9;
	ld.global.u64 	%rd119, [%rd50];
$L__BB10_12:
	mul.lo.s64 	%rd78, %rd114, -7046029254386353131;
	add.s64 	%rd79, %rd78, -7046029254386353131;
	xor.b64  	%rd80, %rd119, %rd79;
	and.b64  	%rd81, %rd80, 4294967295;
	shr.u64 	%rd82, %rd80, 32;
	mul.lo.s64 	%rd83, %rd81, %rd82;
	{
	.reg .b64 %lhs;
	.reg .b64 %rhs;
	shl.b64 	%lhs, %rd80, 32;
	shr.b64 	%rhs, %rd80, 32;
	add.u64 	%rd84, %lhs, %rhs;
	}
	add.s64 	%rd85, %rd84, %rd120;
	add.s64 	%rd120, %rd85, %rd83;
	add.s64 	%rd114, %rd114, %rd36;
	setp.lt.u64 	%p11, %rd114, %rd30;
	add.s64 	%rd113, %rd113, 1;
	@%p11 bra 	$L__BB10_2;
$L__BB10_13:
	setp.ne.s32 	%p12, %r14, 0;
	@%p12 bra 	$L__BB10_15;
	mov.u64 	%rd89, 0;
	st.shared.u64 	[_ZZN46_INTERNAL_00000000_15_copy_kernels_cu_6d2194a748_GLOBAL__N__00000000_15_copy_kernels_cu_6d2194a711add_to_cellERKN7kvferry7SumIntoEmE5total], %rd89;
$L__BB10_15:
	bar.sync 	0;
	mov.b64 {%r38,%r39}, %rd120;
	mov.u32 	%r58, 2;
	mov.u32 	%r59, 31;
	mov.u32 	%r60, 16;
	mov.u32 	%r61, -1;
	shfl.sync.down.b32 	%r41|%p13, %r39, %r60, %r59, %r61;
	shfl.sync.down.b32 	%r40|%p14, %r38, %r60, %r59, %r61;
	mov.b64 %rd91, {%r40,%r41};
	add.s64 	%rd92, %rd91, %rd120;
	mov.b64 {%r42,%r43}, %rd92;
	mov.u32 	%r62, 8;
	shfl.sync.down.b32 	%r45|%p15, %r43, %r62, %r59, %r61;
	shfl.sync.down.b32 	%r44|%p16, %r42, %r62, %r59, %r61;
	mov.b64 %rd93, {%r44,%r45};
	add.s64 	%rd94, %rd93, %rd92;
	mov.b64 {%r46,%r47}, %rd94;
	mov.u32 	%r63, 4;
	shfl.sync.down.b32 	%r49|%p17, %r47, %r63, %r59, %r61;
	shfl.sync.down.b32 	%r48|%p18, %r46, %r63, %r59, %r61;
	mov.b64 %rd95, {%r48,%r49};
	add.s64 	%rd96, %rd95, %rd94;
	mov.b64 {%r50,%r51}, %rd96;
	shfl.sync.down.b32 	%r53|%p19, %r51, %r58, %r59, %r61;
	shfl.sync.down.b32 	%r52|%p20, %r50, %r58, %r59, %r61;
	mov.b64 %rd97, {%r52,%r53};
	add.s64 	%rd98, %rd97, %rd96;
	mov.b64 {%r54,%r55}, %rd98;
	mov.u32 	%r64, 1;
	shfl.sync.down.b32 	%r57|%p21, %r55, %r64, %r59, %r61;
	shfl.sync.down.b32 	%r56|%p22, %r54, %r64, %r59, %r61;
	mov.b64 %rd99, {%r56,%r57};
	add.s64 	%rd25, %rd99, %rd98;
	and.b32  	%r66, %r14, 31;
	setp.ne.s32 	%p23, %r66, 0;
	@%p23 bra 	$L__BB10_17;
	mov.u32 	%r67, _ZZN46_INTERNAL_00000000_15_copy_kernels_cu_6d2194a748_GLOBAL__N__00000000_15_copy_kernels_cu_6d2194a711add_to_cellERKN7kvferry7SumIntoEmE5total;
	atom.shared.add.u64 	%rd100, [%r67], %rd25;
$L__BB10_17:
	bar.sync 	0;
	@%p12 bra 	$L__BB10_20;
	ld.param.u64 	%rd102, [%rd26+16];
	cvta.to.global.u64 	%rd103, %rd102;
	ld.shared.u64 	%rd104, [_ZZN46_INTERNAL_00000000_15_copy_kernels_cu_6d2194a748_GLOBAL__N__00000000_15_copy_kernels_cu_6d2194a711add_to_cellERKN7kvferry7SumIntoEmE5total];
	atom.global.add.u64 	%rd105, [%rd103], %rd104;
	membar.gl;
	add.s64 	%rd106, %rd103, 8;
	atom.global.add.u32 	%r69, [%rd106], 1;
	add.s32 	%r70, %r69, 1;
	ld.param.u32 	%r71, [%rd26+32];
	setp.ne.s32 	%p25, %r70, %r71;
	@%p25 bra 	$L__BB10_20;
	membar.gl;
	ld.param.u64 	%rd108, [%rd26+16];
	cvta.to.global.u64 	%rd109, %rd108;
	atom.global.exch.b64 	%rd110, [%rd109], 0;
	ld.param.u64 	%rd111, [%rd26+24];
	cvta.to.global.u64 	%rd112, %rd111;
	st.global.u64 	[%rd112], %rd110;
	mov.u32 	%r72, 0;
	st.global.u32 	[%rd109+8], %r72;
$L__BB10_20:
	ret;
}
.visible .entry put_header(
	.param .align 8 .b8 put_header_param_0[88]
)
.maxntid 64, 1, 1
{
	.reg .pred 	%p<4>;
	.reg .b16 	%rs<5>;
	.reg .b32 	%r<17>;
	.reg .b64 	%rd<50>;
	mov.b64 	%rd5, put_header_param_0;
	add.s64 	%rd2, %rd5, 16;
	ld.param.u32 	%r1, [put_header_param_0+16];
	mov.u32 	%r2, %tid.x;
	setp.ge.u32 	%p1, %r2, %r1;
	@%p1 bra 	$L__BB11_5;
	cvt.u64.u32 	%rd3, %r2;
	add.s64 	%rd6, %rd5, %rd3;
	ld.param.u8 	%rs4, [%rd6+20];
	ld.param.u64 	%rd4, [%rd2+-8];
	setp.eq.s64 	%p2, %rd4, 0;
	@%p2 bra 	$L__BB11_4;
	add.s32 	%r3, %r2, 8;
	setp.lt.u32 	%p3, %r3, %r1;
	@%p3 bra 	$L__BB11_4;
	add.s32 	%r4, %r1, -8;
	cvt.u64.u32 	%rd7, %r4;
	add.s64 	%rd8, %rd5, 20;
	add.s64 	%rd9, %rd8, %rd7;
	ld.param.u8 	%rd10, [%rd9];
	add.s32 	%r5, %r1, -7;
	cvt.u64.u32 	%rd11, %r5;
	add.s64 	%rd12, %rd8, %rd11;
	ld.param.u8 	%rd13, [%rd12];
	bfi.b64 	%rd14, %rd13, %rd10, 8, 8;
	add.s32 	%r6, %r1, -6;
	cvt.u64.u32 	%rd15, %r6;
	add.s64 	%rd16, %rd8, %rd15;
	ld.param.u8 	%r7, [%rd16];
	mul.wide.u32 	%rd17, %r7, 65536;
	or.b64  	%rd18, %rd17, %rd14;
	add.s32 	%r8, %r1, -5;
	cvt.u64.u32 	%rd19, %r8;
	add.s64 	%rd20, %rd8, %rd19;
	ld.param.u8 	%r9, [%rd20];
	mul.wide.u32 	%rd21, %r9, 16777216;
	or.b64  	%rd22, %rd21, %rd18;
	add.s32 	%r10, %r1, -4;
	cvt.u64.u32 	%rd23, %r10;
	add.s64 	%rd24, %rd8, %rd23;
	ld.param.u8 	%rd25, [%rd24];
	shl.b64 	%rd26, %rd25, 32;
	or.b64  	%rd27, %rd26, %rd22;
	add.s32 	%r11, %r1, -3;
	cvt.u64.u32 	%rd28, %r11;
	add.s64 	%rd29, %rd8, %rd28;
	ld.param.u8 	%rd30, [%rd29];
	shl.b64 	%rd31, %rd30, 40;
	or.b64  	%rd32, %rd31, %rd27;
	add.s32 	%r12, %r1, -2;
	cvt.u64.u32 	%rd33, %r12;
	add.s64 	%rd34, %rd8, %rd33;
	ld.param.u8 	%rd35, [%rd34];
	shl.b64 	%rd36, %rd35, 48;
	or.b64  	%rd37, %rd36, %rd32;
	add.s32 	%r13, %r1, -1;
	cvt.u64.u32 	%rd38, %r13;
	add.s64 	%rd39, %rd8, %rd38;
	ld.param.u8 	%rd40, [%rd39];
	shl.b64 	%rd41, %rd40, 56;
	or.b64  	%rd42, %rd41, %rd37;
	cvta.to.global.u64 	%rd43, %rd4;
	ld.volatile.global.u64 	%rd44, [%rd43];
	add.s64 	%rd45, %rd44, %rd42;
	ld.param.u32 	%r14, [%rd2];
	sub.s32 	%r15, %r3, %r14;
	shl.b32 	%r16, %r15, 3;
	shr.u64 	%rd46, %rd45, %r16;
	cvt.u16.u64 	%rs4, %rd46;
$L__BB11_4:
	ld.param.u64 	%rd47, [%rd2+-16];
	cvta.to.global.u64 	%rd48, %rd47;
	add.s64 	%rd49, %rd48, %rd3;
	st.global.u8 	[%rd49], %rs4;
$L__BB11_5:
	ret;
}
.visible .entry zero_pages_16(
	.param .align 8 .b8 zero_pages_16_param_0[3672]
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<9>;
	.reg .b32 	%r<68>;
	.reg .b64 	%rd<64>;
	mov.b64 	%rd15, zero_pages_16_param_0;
	mov.u32 	%r24, %ntid.x;
	mov.u32 	%r25, %nctaid.x;
	mul.lo.s32 	%r1, %r25, %r24;
	mov.u32 	%r26, %ctaid.x;
	mov.u32 	%r27, %tid.x;
	mad.lo.s32 	%r66, %r26, %r24, %r27;
	add.s64 	%rd2, %rd15, 32;
	ld.param.u32 	%r28, [zero_pages_16_param_0+32];
	setp.ge.u32 	%p1, %r66, %r28;
	@%p1 bra 	$L__BB12_7;
	ld.param.v2.u32 	{%r29, %r30}, [%rd2];
	setp.eq.s32 	%p2, %r30, 1;
	ld.param.v2.u32 	{%r31, %r32}, [%rd2+16];
	ld.param.u64 	%rd4, [%rd2+-32];
	ld.param.u64 	%rd5, [%rd2+-24];
	cvta.to.global.u64 	%rd6, %rd5;
	ld.param.v2.u32 	{%r33, %r34}, [%rd2+-8];
	ld.param.u64 	%rd7, [%rd2+-16];
	@%p2 bra 	$L__BB12_4;
	bra.uni 	$L__BB12_2;
$L__BB12_4:
	setp.eq.s32 	%p6, %r31, 1;
	cvt.u64.u32 	%rd43, %r33;
	mul.lo.s64 	%rd12, %rd7, %rd43;
	mul.wide.u32 	%rd13, %r34, 16;
	cvta.to.global.u64 	%rd14, %rd4;
	@%p6 bra 	$L__BB12_6;
	bra.uni 	$L__BB12_5;
$L__BB12_6:
	ld.global.u64 	%rd54, [%rd14];
	cvta.to.global.u64 	%rd55, %rd54;
	mul.wide.u32 	%rd56, %r66, 4;
	add.s64 	%rd57, %rd15, %rd56;
	ld.param.u32 	%rd58, [%rd57+72];
	ld.global.u64 	%rd59, [%rd6];
	mul.lo.s64 	%rd60, %rd59, %rd58;
	add.s64 	%rd61, %rd12, %rd60;
	add.s64 	%rd62, %rd61, %rd13;
	add.s64 	%rd63, %rd55, %rd62;
	mov.u32 	%r64, 0;
	st.global.v4.u32 	[%rd63], {%r64, %r64, %r64, %r64};
	add.s32 	%r66, %r66, %r1;
	setp.lt.u32 	%p8, %r66, %r29;
	@%p8 bra 	$L__BB12_6;
	bra.uni 	$L__BB12_7;
$L__BB12_5:
	ld.global.u64 	%rd44, [%rd14];
	cvta.to.global.u64 	%rd45, %rd44;
	mul.wide.u32 	%rd46, %r66, 4;
	add.s64 	%rd47, %rd15, %rd46;
	ld.param.u32 	%rd48, [%rd47+72];
	ld.global.u64 	%rd49, [%rd6];
	mul.lo.s64 	%rd50, %rd49, %rd48;
	add.s64 	%rd51, %rd12, %rd50;
	add.s64 	%rd52, %rd51, %rd13;
	add.s64 	%rd53, %rd45, %rd52;
	mov.u32 	%r63, 0;
	st.global.v4.u32 	[%rd53], {%r63, %r63, %r63, %r63};
	add.s32 	%r66, %r66, %r1;
	setp.lt.u32 	%p7, %r66, %r29;
	@%p7 bra 	$L__BB12_5;
	bra.uni 	$L__BB12_7;
$L__BB12_2:
	ld.param.v2.u32 	{%r35, %r36}, [%rd2+8];
	ld.param.u32 	%r9, [%rd2+16];
	ld.param.u32 	%r10, [%rd2+28];
	ld.param.v2.u32 	{%r37, %r38}, [%rd2+24];
	ld.param.v2.u32 	{%r39, %r40}, [%rd2+32];
	mad.lo.s32 	%r65, %r26, %r24, %r27;
	cvta.to.global.u64 	%rd8, %rd4;
	cvt.u64.u32 	%rd9, %r39;
	cvt.u64.u32 	%rd10, %r32;
	cvt.u64.u32 	%rd11, %r35;
$L__BB12_3:
	setp.eq.s32 	%p3, %r31, 1;
	cvt.u64.u32 	%rd16, %r65;
	mul.lo.s64 	%rd17, %rd11, %rd16;
	shr.u64 	%rd18, %rd17, 32;
	cvt.u32.u64 	%r46, %rd18;
	shr.u32 	%r47, %r46, %r36;
	mul.lo.s32 	%r48, %r30, %r47;
	sub.s32 	%r49, %r65, %r48;
	cvt.u64.u32 	%rd19, %r49;
	mul.lo.s64 	%rd20, %rd10, %rd19;
	shr.u64 	%rd21, %rd20, 32;
	cvt.u32.u64 	%r50, %rd21;
	shr.u32 	%r51, %r50, %r37;
	selp.b32 	%r52, %r49, %r51, %p3;
	mul.lo.s32 	%r53, %r9, %r52;
	sub.s32 	%r54, %r49, %r53;
	cvt.u64.u32 	%rd22, %r54;
	mul.lo.s64 	%rd23, %rd9, %rd22;
	shr.u64 	%rd24, %rd23, 32;
	cvt.u32.u64 	%r55, %rd24;
	shr.u32 	%r56, %r55, %r40;
	setp.eq.s32 	%p4, %r10, 1;
	selp.b32 	%r57, %r54, %r56, %p4;
	mul.lo.s32 	%r58, %r38, %r57;
	sub.s32 	%r59, %r54, %r58;
	mul.wide.u32 	%rd25, %r52, 8;
	add.s64 	%rd26, %rd8, %rd25;
	ld.global.u64 	%rd27, [%rd26];
	cvta.to.global.u64 	%rd28, %rd27;
	mul.wide.u32 	%rd30, %r47, 4;
	add.s64 	%rd31, %rd15, %rd30;
	ld.param.u32 	%rd32, [%rd31+72];
	add.s64 	%rd34, %rd6, %rd25;
	ld.global.u64 	%rd35, [%rd34];
	mul.lo.s64 	%rd36, %rd35, %rd32;
	add.s32 	%r60, %r33, %r57;
	cvt.u64.u32 	%rd37, %r60;
	mul.lo.s64 	%rd38, %rd7, %rd37;
	add.s64 	%rd39, %rd38, %rd36;
	add.s32 	%r61, %r59, %r34;
	mul.wide.u32 	%rd40, %r61, 16;
	add.s64 	%rd41, %rd39, %rd40;
	add.s64 	%rd42, %rd28, %rd41;
	mov.u32 	%r62, 0;
	st.global.v4.u32 	[%rd42], {%r62, %r62, %r62, %r62};
	add.s32 	%r65, %r65, %r1;
	setp.lt.u32 	%p5, %r65, %r29;
	@%p5 bra 	$L__BB12_3;
$L__BB12_7:
	ret;
}
.visible .entry zero_pages_4(
	.param .align 8 .b8 zero_pages_4_param_0[3672]
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<9>;
	.reg .b32 	%r<68>;
	.reg .b64 	%rd<64>;
	mov.b64 	%rd15, zero_pages_4_param_0;
	mov.u32 	%r24, %ntid.x;
	mov.u32 	%r25, %nctaid.x;
	mul.lo.s32 	%r1, %r25, %r24;
	mov.u32 	%r26, %ctaid.x;
	mov.u32 	%r27, %tid.x;
	mad.lo.s32 	%r66, %r26, %r24, %r27;
	add.s64 	%rd2, %rd15, 32;
	ld.param.u32 	%r28, [zero_pages_4_param_0+32];
	setp.ge.u32 	%p1, %r66, %r28;
	@%p1 bra 	$L__BB13_7;
	ld.param.v2.u32 	{%r29, %r30}, [%rd2];
	setp.eq.s32 	%p2, %r30, 1;
	ld.param.v2.u32 	{%r31, %r32}, [%rd2+16];
	ld.param.u64 	%rd4, [%rd2+-32];
	ld.param.u64 	%rd5, [%rd2+-24];
	cvta.to.global.u64 	%rd6, %rd5;
	ld.param.v2.u32 	{%r33, %r34}, [%rd2+-8];
	ld.param.u64 	%rd7, [%rd2+-16];
	@%p2 bra 	$L__BB13_4;
	bra.uni 	$L__BB13_2;
$L__BB13_4:
	setp.eq.s32 	%p6, %r31, 1;
	cvt.u64.u32 	%rd43, %r33;
	mul.lo.s64 	%rd12, %rd7, %rd43;
	mul.wide.u32 	%rd13, %r34, 4;
	cvta.to.global.u64 	%rd14, %rd4;
	@%p6 bra 	$L__BB13_6;
	bra.uni 	$L__BB13_5;
$L__BB13_6:
	ld.global.u64 	%rd54, [%rd14];
	cvta.to.global.u64 	%rd55, %rd54;
	mul.wide.u32 	%rd56, %r66, 4;
	add.s64 	%rd57, %rd15, %rd56;
	ld.param.u32 	%rd58, [%rd57+72];
	ld.global.u64 	%rd59, [%rd6];
	mul.lo.s64 	%rd60, %rd59, %rd58;
	add.s64 	%rd61, %rd12, %rd60;
	add.s64 	%rd62, %rd61, %rd13;
	add.s64 	%rd63, %rd55, %rd62;
	mov.u32 	%r64, 0;
	st.global.u32 	[%rd63], %r64;
	add.s32 	%r66, %r66, %r1;
	setp.lt.u32 	%p8, %r66, %r29;
	@%p8 bra 	$L__BB13_6;
	bra.uni 	$L__BB13_7;
$L__BB13_5:
	ld.global.u64 	%rd44, [%rd14];
	cvta.to.global.u64 	%rd45, %rd44;
	mul.wide.u32 	%rd46, %r66, 4;
	add.s64 	%rd47, %rd15, %rd46;
	ld.param.u32 	%rd48, [%rd47+72];
	ld.global.u64 	%rd49, [%rd6];
	mul.lo.s64 	%rd50, %rd49, %rd48;
	add.s64 	%rd51, %rd12, %rd50;
	add.s64 	%rd52, %rd51, %rd13;
	add.s64 	%rd53, %rd45, %rd52;
	mov.u32 	%r63, 0;
	st.global.u32 	[%rd53], %r63;
	add.s32 	%r66, %r66, %r1;
	setp.lt.u32 	%p7, %r66, %r29;
	@%p7 bra 	$L__BB13_5;
	bra.uni 	$L__BB13_7;
$L__BB13_2:
	ld.param.v2.u32 	{%r35, %r36}, [%rd2+8];
	ld.param.u32 	%r9, [%rd2+16];
	ld.param.u32 	%r10, [%rd2+28];
	ld.param.v2.u32 	{%r37, %r38}, [%rd2+24];
	ld.param.v2.u32 	{%r39, %r40}, [%rd2+32];
	mad.lo.s32 	%r65, %r26, %r24, %r27;
	cvta.to.global.u64 	%rd8, %rd4;
	cvt.u64.u32 	%rd9, %r39;
	cvt.u64.u32 	%rd10, %r32;
	cvt.u64.u32 	%rd11, %r35;
$L__BB13_3:
	mov.u32 	%r46, 0;
	setp.eq.s32 	%p3, %r31, 1;
	cvt.u64.u32 	%rd16, %r65;
	mul.lo.s64 	%rd17, %rd11, %rd16;
	shr.u64 	%rd18, %rd17, 32;
	cvt.u32.u64 	%r47, %rd18;
	shr.u32 	%r48, %r47, %r36;
	mul.lo.s32 	%r49, %r30, %r48;
	sub.s32 	%r50, %r65, %r49;
	cvt.u64.u32 	%rd19, %r50;
	mul.lo.s64 	%rd20, %rd10, %rd19;
	shr.u64 	%rd21, %rd20, 32;
	cvt.u32.u64 	%r51, %rd21;
	shr.u32 	%r52, %r51, %r37;
	selp.b32 	%r53, %r50, %r52, %p3;
	mul.lo.s32 	%r54, %r9, %r53;
	sub.s32 	%r55, %r50, %r54;
	cvt.u64.u32 	%rd22, %r55;
	mul.lo.s64 	%rd23, %rd9, %rd22;
	shr.u64 	%rd24, %rd23, 32;
	cvt.u32.u64 	%r56, %rd24;
	shr.u32 	%r57, %r56, %r40;
	setp.eq.s32 	%p4, %r10, 1;
	selp.b32 	%r58, %r55, %r57, %p4;
	mul.lo.s32 	%r59, %r38, %r58;
	sub.s32 	%r60, %r55, %r59;
	mul.wide.u32 	%rd25, %r53, 8;
	add.s64 	%rd26, %rd8, %rd25;
	ld.global.u64 	%rd27, [%rd26];
	cvta.to.global.u64 	%rd28, %rd27;
	mul.wide.u32 	%rd30, %r48, 4;
	add.s64 	%rd31, %rd15, %rd30;
	ld.param.u32 	%rd32, [%rd31+72];
	add.s64 	%rd34, %rd6, %rd25;
	ld.global.u64 	%rd35, [%rd34];
	mul.lo.s64 	%rd36, %rd35, %rd32;
	add.s32 	%r61, %r33, %r58;
	cvt.u64.u32 	%rd37, %r61;
	mul.lo.s64 	%rd38, %rd7, %rd37;
	add.s64 	%rd39, %rd38, %rd36;
	add.s32 	%r62, %r60, %r34;
	mul.wide.u32 	%rd40, %r62, 4;
	add.s64 	%rd41, %rd39, %rd40;
	add.s64 	%rd42, %rd28, %rd41;
	st.global.u32 	[%rd42], %r46;
	add.s32 	%r65, %r65, %r1;
	setp.lt.u32 	%p5, %r65, %r29;
	@%p5 bra 	$L__BB13_3;
$L__BB13_7:
	ret;
}
.visible .entry zero_pages_1(
	.param .align 8 .b8 zero_pages_1_param_0[3672]
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<4>;
	.reg .b32 	%r<65>;
	.reg .b64 	%rd<64>;
	mov.b64 	%rd15, zero_pages_1_param_0;
	mov.u32 	%r24, %ntid.x;
	mov.u32 	%r25, %nctaid.x;
	mul.lo.s32 	%r1, %r25, %r24;
	mov.u32 	%r26, %ctaid.x;
	mov.u32 	%r27, %tid.x;
	mad.lo.s32 	%r63, %r26, %r24, %r27;
	add.s64 	%rd2, %rd15, 32;
	ld.param.u32 	%r28, [zero_pages_1_param_0+32];
	setp.ge.u32 	%p1, %r63, %r28;
	@%p1 bra 	$L__BB14_7;
	ld.param.v2.u32 	{%r29, %r30}, [%rd2];
	setp.eq.s32 	%p2, %r30, 1;
	ld.param.v2.u32 	{%r31, %r32}, [%rd2+16];
	ld.param.u64 	%rd4, [%rd2+-32];
	ld.param.u64 	%rd5, [%rd2+-24];
	cvta.to.global.u64 	%rd6, %rd5;
	ld.param.v2.u32 	{%r33, %r34}, [%rd2+-8];
	ld.param.u64 	%rd7, [%rd2+-16];
	@%p2 bra 	$L__BB14_4;
	bra.uni 	$L__BB14_2;
$L__BB14_4:
	setp.eq.s32 	%p6, %r31, 1;
	cvt.u64.u32 	%rd43, %r33;
	mul.lo.s64 	%rd12, %rd7, %rd43;
	cvt.u64.u32 	%rd13, %r34;
	cvta.to.global.u64 	%rd14, %rd4;
	@%p6 bra 	$L__BB14_6;
	bra.uni 	$L__BB14_5;
$L__BB14_6:
	ld.global.u64 	%rd54, [%rd14];
	cvta.to.global.u64 	%rd55, %rd54;
	mul.wide.u32 	%rd56, %r63, 4;
	add.s64 	%rd57, %rd15, %rd56;
	ld.param.u32 	%rd58, [%rd57+72];
	ld.global.u64 	%rd59, [%rd6];
	mul.lo.s64 	%rd60, %rd59, %rd58;
	add.s64 	%rd61, %rd12, %rd60;
	add.s64 	%rd62, %rd61, %rd13;
	add.s64 	%rd63, %rd55, %rd62;
	mov.u16 	%rs3, 0;
	st.global.u8 	[%rd63], %rs3;
	add.s32 	%r63, %r63, %r1;
	setp.lt.u32 	%p8, %r63, %r29;
	@%p8 bra 	$L__BB14_6;
	bra.uni 	$L__BB14_7;
$L__BB14_5:
	ld.global.u64 	%rd44, [%rd14];
	cvta.to.global.u64 	%rd45, %rd44;
	mul.wide.u32 	%rd46, %r63, 4;
	add.s64 	%rd47, %rd15, %rd46;
	ld.param.u32 	%rd48, [%rd47+72];
	ld.global.u64 	%rd49, [%rd6];
	mul.lo.s64 	%rd50, %rd49, %rd48;
	add.s64 	%rd51, %rd12, %rd50;
	add.s64 	%rd52, %rd51, %rd13;
	add.s64 	%rd53, %rd45, %rd52;
	mov.u16 	%rs2, 0;
	st.global.u8 	[%rd53], %rs2;
	add.s32 	%r63, %r63, %r1;
	setp.lt.u32 	%p7, %r63, %r29;
	@%p7 bra 	$L__BB14_5;
	bra.uni 	$L__BB14_7;
$L__BB14_2:
	ld.param.v2.u32 	{%r35, %r36}, [%rd2+8];
	ld.param.u32 	%r9, [%rd2+16];
	ld.param.u32 	%r10, [%rd2+28];
	ld.param.v2.u32 	{%r37, %r38}, [%rd2+24];
	ld.param.v2.u32 	{%r39, %r40}, [%rd2+32];
	mad.lo.s32 	%r62, %r26, %r24, %r27;
	cvta.to.global.u64 	%rd8, %rd4;
	cvt.u64.u32 	%rd9, %r39;
	cvt.u64.u32 	%rd10, %r32;
	cvt.u64.u32 	%rd11, %r35;
$L__BB14_3:
	setp.eq.s32 	%p3, %r31, 1;
	cvt.u64.u32 	%rd16, %r62;
	mul.lo.s64 	%rd17, %rd11, %rd16;
	shr.u64 	%rd18, %rd17, 32;
	cvt.u32.u64 	%r46, %rd18;
	shr.u32 	%r47, %r46, %r36;
	mul.lo.s32 	%r48, %r30, %r47;
	sub.s32 	%r49, %r62, %r48;
	cvt.u64.u32 	%rd19, %r49;
	mul.lo.s64 	%rd20, %rd10, %rd19;
	shr.u64 	%rd21, %rd20, 32;
	cvt.u32.u64 	%r50, %rd21;
	shr.u32 	%r51, %r50, %r37;
	selp.b32 	%r52, %r49, %r51, %p3;
	mul.lo.s32 	%r53, %r9, %r52;
	sub.s32 	%r54, %r49, %r53;
	cvt.u64.u32 	%rd22, %r54;
	mul.lo.s64 	%rd23, %rd9, %rd22;
	shr.u64 	%rd24, %rd23, 32;
	cvt.u32.u64 	%r55, %rd24;
	shr.u32 	%r56, %r55, %r40;
	setp.eq.s32 	%p4, %r10, 1;
	selp.b32 	%r57, %r54, %r56, %p4;
	mul.lo.s32 	%r58, %r38, %r57;
	sub.s32 	%r59, %r54, %r58;
	mul.wide.u32 	%rd25, %r52, 8;
	add.s64 	%rd26, %rd8, %rd25;
	ld.global.u64 	%rd27, [%rd26];
	cvta.to.global.u64 	%rd28, %rd27;
	mul.wide.u32 	%rd30, %r47, 4;
	add.s64 	%rd31, %rd15, %rd30;
	ld.param.u32 	%rd32, [%rd31+72];
	add.s64 	%rd34, %rd6, %rd25;
	ld.global.u64 	%rd35, [%rd34];
	mul.lo.s64 	%rd36, %rd35, %rd32;
	add.s32 	%r60, %r33, %r57;
	cvt.u64.u32 	%rd37, %r60;
	mul.lo.s64 	%rd38, %rd7, %rd37;
	add.s64 	%rd39, %rd38, %rd36;
	add.s32 	%r61, %r59, %r34;
	cvt.u64.u32 	%rd40, %r61;
	add.s64 	%rd41, %rd39, %rd40;
	add.s64 	%rd42, %rd28, %rd41;
	mov.u16 	%rs1, 0;
	st.global.u8 	[%rd42], %rs1;
	add.s32 	%r62, %r62, %r1;
	setp.lt.u32 	%p5, %r62, %r29;
	@%p5 bra 	$L__BB14_3;
$L__BB14_7:
	ret;
}
)ptx";

}  // namespace kvferry
